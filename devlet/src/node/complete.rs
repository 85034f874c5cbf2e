//! Completion of names on the command line, from the running devlet.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use clap_complete::{ArgValueCompleter, CompletionCandidate};
use devlet_client::{Client, locate, v1};

use super::inventory::{Plugin, Resource};
use super::kind::Kind;
use super::listing::{Claims, Devices, Drivers, Item, Listing, Plugins, Pods, Resources, Slices};
use super::pods::Pod;

/// Maximum time for a devlet to answer, while the shell waits for completions.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Completes kinds, and names after `KIND/`.
pub(super) fn kinds() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let current = current.to_string_lossy();
        if let Some((kind, name)) = current.split_once('/') {
            let names = Kind::parse(kind)
                .map(|found| offered(found, name))
                .unwrap_or_default();
            return names
                .into_iter()
                .map(|(name, help)| candidate(&format!("{kind}/{name}"), help))
                .collect();
        }
        let kinds = Kind::value_variants().iter();
        let kinds = kinds.filter(|kind| kind.many().starts_with(&*current));
        kinds
            .map(|kind| {
                CompletionCandidate::new(kind.many()).help(
                    kind.to_possible_value()
                        .and_then(|value| value.get_help().cloned()),
                )
            })
            .collect()
    })
}

/// Completes names of the kind before them.
pub(super) fn names() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let kind = kind_before();
        kind.map(|kind| candidates(kind, current)).unwrap_or_default()
    })
}

/// Returns the kind after `get` or `describe`.
fn kind_before() -> Option<Kind> {
    let words = words();
    let mut after = words
        .iter()
        .skip_while(|word| *word != "get" && *word != "describe")
        .skip(1);
    after.find_map(|word| Kind::parse(word.to_str()?))
}

/// Completes resources, and DRA drivers: devices are listed by either.
pub(super) fn resources_and_drivers() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let mut names = candidates(Kind::Resources, current);
        if kind_before() != Some(Kind::Plugins) {
            names.extend(candidates(Kind::Drivers, current));
        }
        names
    })
}

/// Completes the resource of `RESOURCE=COUNT`, up to the `=`.
pub(super) fn limits() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let names = offered(Kind::Resources, &current.to_string_lossy()).into_iter();
        names
            .map(|(name, help)| candidate(&format!("{name}="), help))
            .collect()
    })
}

/// Completes pods, also as `pod/NAME`.
pub(super) fn pods() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let mut names = candidates(Kind::Pods, current);
        let text = current.to_string_lossy();
        if let Some((kind, name)) = text.split_once('/')
            && Kind::parse(kind) == Some(Kind::Pods)
        {
            let prefixed = offered(Kind::Pods, name).into_iter();
            names.extend(prefixed.map(|(name, help)| candidate(&format!("{kind}/{name}"), help)));
        }
        names
    })
}

/// Completes namespaces that have pods or claims.
pub(super) fn namespaces() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let namespaces = query(async |client| {
            let pods = client.list_pods(v1::ListPodsRequest::default()).await.ok()?.pods;
            let claims = client.list_claims(v1::ListClaimsRequest::default()).await.ok()?;
            let pods = pods.into_iter().filter_map(|pod| Some(pod.id?.namespace));
            let claims = claims.claims.into_iter();
            let claims = claims.filter_map(|claim| Some(claim.id?.namespace));
            Some(pods.chain(claims).collect::<BTreeSet<String>>())
        });
        with_prefix(current, namespaces)
    })
}

/// Completes containers of the pod before them.
pub(super) fn containers() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let containers = query(async |client| {
            let list = client.list_pods(v1::ListPodsRequest::default()).await.ok()?;
            // The first word that is a pod; other words are options and their values.
            let words = words();
            let words = words.iter().skip_while(|word| *word != "options").skip(1);
            let mut words = words.filter_map(|word| word.to_str());
            let pods: Vec<(Pod, Vec<String>)> = list.pods.into_iter().map(with_containers).collect();
            words.find_map(|word| {
                let named = pods.iter().find(|(pod, _)| pod.is_called(word));
                named.map(|(_, containers)| containers.clone())
            })
        });
        with_prefix(current, containers)
    })
}

/// Returns a pod and the names of its containers. Of an imported pod only those with devices are known.
fn with_containers(pod: v1::Pod) -> (Pod, Vec<String>) {
    let names = match &pod.container_names[..] {
        [] => pod.containers.iter().map(|each| each.name.clone()).collect(),
        names => names.to_vec(),
    };
    (Pod::from(pod), names)
}

fn with_prefix(current: &OsStr, names: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    let current = current.to_string_lossy();
    let names = names.into_iter();
    let names = names.filter(|name| !name.is_empty() && name.starts_with(&*current));
    names.map(CompletionCandidate::new).collect()
}

/// Completes names of one kind.
pub(super) fn of(kind: Kind) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| candidates(kind, current))
}

fn candidates(kind: Kind, current: &OsStr) -> Vec<CompletionCandidate> {
    let names = offered(kind, &current.to_string_lossy());
    names
        .into_iter()
        .map(|(name, help)| candidate(&name, help))
        .collect()
}

fn candidate(name: &str, help: String) -> CompletionCandidate {
    CompletionCandidate::new(name).help(Some(help.into()))
}

/// Returns the words of the command line to complete.
fn words() -> Vec<OsString> {
    std::env::args_os()
        .skip_while(|word| word != "--")
        .skip(1)
        .collect()
}

/// Returns the value of an option on the command line to complete.
fn option(names: &[&str]) -> Option<OsString> {
    let words = words();
    let with_value = words.iter().find_map(|word| {
        let text = word.to_str()?;
        names
            .iter()
            .find_map(|name| text.strip_prefix(name)?.strip_prefix('='))
    });
    let following = words.windows(2).find_map(|pair| match pair {
        [name, value] if names.iter().any(|known| name == known) => Some(value.clone()),
        _ => None,
    });
    with_value.map(OsString::from).or(following)
}

/// Asks the running devlet. If it does not answer, there are no candidates.
fn query<T: Default>(question: impl AsyncFnOnce(Client) -> Option<T>) -> T {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return T::default();
    };
    let root = option(&["--root-dir"]).map(PathBuf::from);
    let answer = async {
        let sockets = locate::sockets(root.as_deref());
        let client = Client::connect_any(&sockets, TIMEOUT).await.ok()?;
        question(client).await
    };
    let answer = runtime.block_on(async { tokio::time::timeout(TIMEOUT, answer).await });
    answer.ok().flatten().unwrap_or_default()
}

/// Returns names that begin with `current`, each with a help text.
fn offered(kind: Kind, current: &str) -> Vec<(String, String)> {
    let names = query(async |client| listed(kind, client).await);
    let namespace = option(&["--namespace", "-n"]).filter(|_| kind.has_namespace());
    let namespace = namespace.as_ref().map(|text| text.to_string_lossy().into_owned());
    chosen(names, current, namespace.as_deref())
}

/// A full name, the name without its namespace or resource, and a help text.
type Name = (String, String, String);

/// Returns short names where they are unique, unless the current word is the start of a full name.
fn chosen(names: Vec<Name>, current: &str, namespace: Option<&str>) -> Vec<(String, String)> {
    let in_namespace = |(full, ..): &Name| {
        namespace.is_none_or(|namespace| full.split_once('/').is_some_and(|(own, _)| own == namespace))
    };
    let names: Vec<Name> = names.into_iter().filter(in_namespace).collect();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (_, short, _) in &names {
        *counts.entry(short.clone()).or_default() += 1;
    }
    let one = |(full, short, help): Name| {
        let is_unique = counts.get(&short) == Some(&1);
        let is_short = is_unique && short.starts_with(current);
        (if is_short { short } else { full }, help)
    };
    let mut offered: Vec<(String, String)> = names
        .into_iter()
        .map(one)
        .filter(|(name, _)| name.starts_with(current))
        .collect();
    offered.sort();
    offered.dedup_by(|a, b| a.0 == b.0);
    offered
}

async fn listed(kind: Kind, client: Client) -> Option<Vec<Name>> {
    Some(match kind {
        Kind::Resources => {
            let list = client.list_resources(v1::ListResourcesRequest {}).await.ok()?;
            let help = |each: &Resource| each.state.to_owned();
            described(&Resources::from(list), |each| each.name.clone(), help)
        }
        Kind::Devices => {
            let list = client
                .list_devices(v1::ListDevicesRequest::default())
                .await
                .ok()?;
            described(
                &Devices::from(list),
                |each| each.id.clone(),
                |each| each.resource.clone(),
            )
        }
        Kind::Plugins => {
            let list = client.list_plugins(v1::ListPluginsRequest {}).await.ok()?;
            let file = |each: &Plugin| each.endpoint.rsplit('/').next().unwrap_or_default().to_owned();
            described(&Plugins::from(list), file, |each| each.resource.clone())
        }
        Kind::Pods => {
            let list = client.list_pods(v1::ListPodsRequest::default()).await.ok()?;
            let short = |each: &Pod| match each.id.name.as_str() {
                "" => each.id.uid.clone(),
                name => name.to_owned(),
            };
            described(&Pods::from(list), short, |each| each.id.namespace.clone())
        }
        Kind::Drivers => {
            let list = client
                .list_drivers(v1::ListDriversRequest::default())
                .await
                .ok()?;
            described(
                &Drivers::from(list),
                |each| each.name.clone(),
                |each| each.state.to_owned(),
            )
        }
        Kind::Claims => {
            let list = client.list_claims(v1::ListClaimsRequest::default()).await.ok()?;
            described(
                &Claims::from(list),
                |each| each.id.name.clone(),
                |each| each.phase.to_owned(),
            )
        }
        Kind::Slices => {
            let list = client.list_slices(v1::ListSlicesRequest::default()).await.ok()?;
            described(
                &Slices::from(list),
                |each| each.name.clone(),
                |each| each.driver.clone(),
            )
        }
    })
}

fn described<L: Listing>(
    list: &L,
    short: impl Fn(&L::Item) -> String,
    help: impl Fn(&L::Item) -> String,
) -> Vec<Name> {
    let items = list.items().iter();
    items.map(|item| (item.name(), short(item), help(item))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(current: &str, namespace: Option<&str>) -> Vec<String> {
        let name = |full: &str| {
            let short = full.rsplit('/').next().unwrap_or_default();
            (full.to_owned(), short.to_owned(), String::new())
        };
        let all = vec![name("a/job"), name("b/job"), name("b/web")];
        let offered = chosen(all, current, namespace);
        offered.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn a_short_name_is_offered_where_it_is_unique() {
        assert_eq!(names("", None), ["a/job", "b/job", "web"]);
        assert_eq!(names("w", None), ["web"]);
        assert_eq!(names("b/", None), ["b/job", "b/web"]);
        assert_eq!(names("", Some("b")), ["job", "web"]);
        assert!(names("x", None).is_empty());
    }
}
