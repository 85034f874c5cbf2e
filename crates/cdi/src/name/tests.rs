use proptest::prelude::*;

use super::*;

#[test]
fn valid_names_split_into_their_parts_and_print_back() {
    for (text, vendor, class, name) in [
        ("vendor.com/class=dev", "vendor.com", "class", "dev"),
        ("a/b=c", "a", "b", "c"),
        ("aa/b=cc", "aa", "b", "cc"),
        ("a/bb=cc", "a", "bb", "cc"),
        ("vendor.com/class=0", "vendor.com", "class", "0"),
        ("vendor1.com/class1=dev1", "vendor1.com", "class1", "dev1"),
        (
            "vendor1.com/class.subclass=dev1",
            "vendor1.com",
            "class.subclass",
            "dev1",
        ),
        (
            "other-vendor1.com/class_1=dev_1",
            "other-vendor1.com",
            "class_1",
            "dev_1",
        ),
        (
            "yet_another-vendor2.com/c-lass_2=dev_1:2.3",
            "yet_another-vendor2.com",
            "c-lass_2",
            "dev_1:2.3",
        ),
        ("V/C=0", "V", "C", "0"),
        ("v--..__v/c=9::--9", "v--..__v", "c", "9::--9"),
    ] {
        let parsed: QualifiedName = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(
            (parsed.vendor(), parsed.class(), parsed.name()),
            (vendor, class, name),
            "{text}"
        );
        assert_eq!(parsed.kind(), format!("{vendor}/{class}"));
        assert_eq!(parsed.to_string(), text);
        assert_eq!(QualifiedName::new(vendor, class, name), Ok(parsed));
    }
}

#[test]
fn an_error_about_a_missing_part_names_the_part() {
    for (text, part) in [
        ("", Part::Vendor),
        ("dev", Part::Vendor),
        ("=dev", Part::Vendor),
        ("vendor.com/class", Part::Name),
        ("vendor.com/class=", Part::Name),
        ("vendor.com/=dev", Part::Class),
        ("vendor.com=dev", Part::Class),
        ("=", Part::Vendor),
    ] {
        let refused = text.parse::<QualifiedName>();
        assert_eq!(
            refused,
            Err(InvalidName::Missing {
                text: text.to_owned(),
                part
            }),
            "{text:?}"
        );
    }
}

#[test]
fn a_path_is_not_a_name() {
    for path in ["/", "/dev/null", "/dev/x=y", "/vendor.com/class=dev"] {
        assert_eq!(
            path.parse::<QualifiedName>(),
            Err(InvalidName::Path {
                path: path.to_owned()
            })
        );
    }
}

#[test]
fn a_part_that_breaks_a_rule_is_named_with_the_character() {
    let first = |part, value: &str, found| InvalidName::First {
        part,
        value: value.to_owned(),
        found,
    };
    let inner = |part, value: &str, found| InvalidName::Inner {
        part,
        value: value.to_owned(),
        found,
    };
    let last = |part, value: &str, found| InvalidName::Last {
        part,
        value: value.to_owned(),
        found,
    };
    for (text, why) in [
        ("_invalid.com/class=dev", first(Part::Vendor, "_invalid.com", '_')),
        ("1vendor/class=dev", first(Part::Vendor, "1vendor", '1')),
        (
            "invalid2.com-/class=dev",
            last(Part::Vendor, "invalid2.com-", '-'),
        ),
        ("invalid3.com/_class=dev", first(Part::Class, "_class", '_')),
        ("vendor.com/1class=dev", first(Part::Class, "1class", '1')),
        ("invalid4.com/class_=dev", last(Part::Class, "class_", '_')),
        ("invalid5.com/class=-dev", first(Part::Name, "-dev", '-')),
        ("invalid6.com/class=dev:", last(Part::Name, "dev:", ':')),
        ("*.com/*dev=*gpu*", first(Part::Vendor, "*.com", '*')),
        ("v:v/class=dev", inner(Part::Vendor, "v:v", ':')),
        ("v/c:c=dev", inner(Part::Class, "c:c", ':')),
        ("v/c/d=dev", inner(Part::Class, "c/d", '/')),
        ("v/c=a=b", inner(Part::Name, "a=b", '=')),
        ("v/c=a/b", inner(Part::Name, "a/b", '/')),
        ("é/c=d", first(Part::Vendor, "é", 'é')),
        ("vé/c=d", last(Part::Vendor, "vé", 'é')),
        ("v/cé1=d", inner(Part::Class, "cé1", 'é')),
        ("v/c=٣", first(Part::Name, "٣", '٣')),
    ] {
        assert_eq!(text.parse::<QualifiedName>(), Err(why), "{text}");
    }
}

#[test]
fn an_error_states_the_rule() {
    let error = "vendor.com/class=dev:".parse::<QualifiedName>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "device name \"dev:\" ends with ':', it must end with a letter or digit"
    );
    let error = "v/9=d".parse::<QualifiedName>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "class \"9\" begins with '9', it must begin with a letter"
    );
}

#[test]
fn serde_rejects_the_names_that_parsing_rejects() {
    let name: QualifiedName = serde_json::from_str("\"v.com/c=d\"").unwrap();
    assert_eq!(serde_json::to_string(&name).unwrap(), "\"v.com/c=d\"");
    assert!(serde_json::from_str::<QualifiedName>("\"v.com/c\"").is_err());
}

proptest! {
    #[test]
    fn any_valid_name_prints_and_parses_back_equal(
        vendor in "[A-Za-z]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?",
        class in "[A-Za-z]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?",
        name in "[A-Za-z0-9]([A-Za-z0-9_.:-]{0,20}[A-Za-z0-9])?",
    ) {
        let built = QualifiedName::new(&vendor, &class, &name).unwrap();
        let parsed: QualifiedName = built.to_string().parse().unwrap();
        prop_assert_eq!(&parsed, &built);
        prop_assert_eq!((parsed.vendor(), parsed.class(), parsed.name()), (&*vendor, &*class, &*name));
    }

    #[test]
    fn any_text_parses_or_is_refused_without_a_panic(text in "[/=a.é:_-]{0,8}|.{0,20}") {
        if let Ok(name) = text.parse::<QualifiedName>() {
            prop_assert_eq!(name.as_str(), text);
        }
    }
}
