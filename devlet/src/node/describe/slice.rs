//! `devlet describe slice`: a ResourceSlice of this node.

use devlet_client::{Client, v1};

use super::{field, no_such};
use crate::Outcome;
use crate::node::kind::Kind;
use crate::node::slices::Slice;
use crate::output::{self, Output, escape_control};

pub(super) async fn run(client: &Client, name: &str, output: Output) -> anyhow::Result<Outcome> {
    let slices = client.list_slices(v1::ListSlicesRequest::default()).await?.slices;
    let Some(slice) = slices.iter().find(|slice| slice.name == name) else {
        let known = slices.into_iter().map(|slice| slice.name);
        return Ok(no_such(Kind::Slices, name, known));
    };
    output::print(output, &Slice::from(slice.clone()), slice_text)?;
    Ok(Outcome::Fine)
}

fn slice_text(slice: &Slice) -> String {
    let mut text = format!(
        "Name:        {}\nDriver:      {}\nPool:        {}, generation {}\nDevices:     {}\n",
        escape_control(&slice.name),
        escape_control(&slice.driver),
        escape_control(&slice.pool),
        slice.generation,
        slice.devices,
    );
    if let Some(created_at) = &slice.created_at {
        text.push_str(&format!("Created:     {created_at} ({} ago)\n", slice.age_text()));
    }
    if slice.stale_owner {
        let stale = format!("an earlier Node object: driver {} must restart", slice.driver);
        text.push_str(&field("Owner:       ", &stale));
    }
    if let Some(wiped_at) = &slice.wiped_at {
        let wipe = format!("at {wiped_at}, unless a plugin of the driver connects");
        text.push_str(&field("Wiped:       ", &wipe));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::samples;

    #[test]
    fn a_slice_is_described_with_its_owner_and_its_end() {
        let text = slice_text(&samples::slice().into());
        for expected in [
            "Pool:        node-1, generation 3\n",
            "Created:     2023-11-14T22:13:20Z (7s ago)\n",
            "Owner:       an earlier Node object: driver gpu.acme.com must restart\n",
            "Wiped:       at 2023-11-14T22:13:57Z, unless a plugin of the driver connects\n",
        ] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        let mut kept = samples::slice();
        (kept.has_stale_owner, kept.wiped_at_ms) = (false, None);
        let text = slice_text(&kept.into());
        assert!(!text.contains("Owner:") && !text.contains("Wiped:"), "{text}");
    }
}
