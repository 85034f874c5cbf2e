//! `devlet get`: lists of resources, devices, plugins, pods, drivers, claims and slices.

use std::time::Duration;

use devlet_client::{Client, Status, Watch, v1};

use super::claims::Claim;
use super::drivers::Driver;
use super::inventory::{Device, Plugin, Resource};
use super::kind::{Kind, Target, TargetParser, name};
use super::listing::{Claims, Devices, Drivers, Item, Listing, Plugins, Pods, Resources, Slices};
use super::pods::Pod;
use super::select::{Filter, NamespaceArg, NoMatch, check_sort_key, check_sort_path, near};
use super::selector::Selector;
use super::slices::Slice;
use super::watch::{self, View};
use super::{ConnectArg, complete};
use crate::output::{self, ListOutputArg, Output};
use crate::table::Screen;
use crate::{Outcome, jsonpath};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Kind to list; KIND/NAME for one object
    #[arg(value_name = "resources|devices|plugins|pods|drivers|claims|slices", value_parser = TargetParser)]
    #[arg(add = complete::kinds())]
    kind: Target,
    /// List only objects with these names
    #[arg(value_name = "NAME", value_parser = name, add = complete::names())]
    names: Vec<String>,
    #[command(flatten)]
    namespace: NamespaceArg,
    /// List only pods with these labels: KEY=VALUE, KEY!=VALUE, KEY, !KEY, KEY in (VALUE, ...), separated by commas
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<Selector>,
    /// List only devices or plugins of this resource, or devices of this DRA driver
    #[arg(long, value_name = "NAME", value_parser = name)]
    #[arg(add = complete::resources_and_drivers())]
    resource: Option<String>,
    /// Sort by a JSONPath of each item, as in .name
    #[arg(long, value_name = "JSONPATH")]
    sort_by: Option<jsonpath::Path>,
    /// Omit the column titles
    #[arg(long)]
    no_headers: bool,
    /// Print changes until interrupted
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    connect: ConnectArg,
    #[command(flatten)]
    output: ListOutputArg,
}

pub(super) async fn run(args: Args) -> anyhow::Result<Outcome> {
    let (kind, names) = args.kind.names(args.names)?;
    if args.resource.is_some() && !matches!(kind, Kind::Devices | Kind::Plugins) {
        anyhow::bail!("--resource is for devices and plugins: devlet get devices --resource NAME");
    }
    if args.selector.is_some() && kind != Kind::Pods {
        anyhow::bail!("--selector is for pods: {} do not have labels", kind.many());
    }
    let filter = Filter {
        namespace: args.namespace.of(kind)?,
        names,
        selector: args.selector.as_ref(),
        resource: args.resource.as_deref(),
    };
    let show = Show {
        view: View {
            output: &args.output.output,
            filter: &filter,
            sort_by: args.sort_by.as_ref(),
            no_headers: args.no_headers,
        },
        watch: args.watch,
        timeout: args.connect.timeout.0,
    };
    if let Some(path) = &args.sort_by {
        match kind {
            Kind::Resources => check_sort_key::<Resource>(path)?,
            Kind::Devices => check_sort_key::<Device>(path)?,
            Kind::Plugins => check_sort_key::<Plugin>(path)?,
            Kind::Pods => check_sort_key::<Pod>(path)?,
            Kind::Drivers => check_sort_key::<Driver>(path)?,
            Kind::Claims => check_sort_key::<Claim>(path)?,
            Kind::Slices => check_sort_key::<Slice>(path)?,
        }
    }
    let client = args.connect.connect().await?;
    match kind {
        Kind::Resources => {
            let request = v1::ListResourcesRequest {};
            let list = async |client: &Client| client.list_resources(request).await;
            let watch = async |client: &Client| client.watch_resources(request).await;
            show.run::<_, Resources>(client, list, watch).await
        }
        Kind::Devices => {
            let request = v1::ListDevicesRequest {
                resource: filter.resource.unwrap_or_default().to_owned(),
            };
            let list = async |client: &Client| client.list_devices(request.clone()).await;
            let watch = async |client: &Client| client.watch_devices(request.clone()).await;
            show.run::<_, Devices>(client, list, watch).await
        }
        Kind::Plugins => {
            let request = v1::ListPluginsRequest {};
            let list = async |client: &Client| client.list_plugins(request).await;
            let watch = async |client: &Client| client.watch_plugins(request).await;
            show.run::<_, Plugins>(client, list, watch).await
        }
        Kind::Pods => {
            let request = v1::ListPodsRequest::default();
            let list = async |client: &Client| client.list_pods(request.clone()).await;
            let watch = async |client: &Client| client.watch_pods(request.clone()).await;
            show.run::<_, Pods>(client, list, watch).await
        }
        Kind::Drivers => {
            let request = v1::ListDriversRequest::default();
            let list = async |client: &Client| client.list_drivers(request.clone()).await;
            let watch = async |client: &Client| client.watch_drivers(request.clone()).await;
            show.run::<_, Drivers>(client, list, watch).await
        }
        Kind::Claims => {
            let request = v1::ListClaimsRequest::default();
            let list = async |client: &Client| client.list_claims(request.clone()).await;
            let watch = async |client: &Client| client.watch_claims(request.clone()).await;
            show.run::<_, Claims>(client, list, watch).await
        }
        Kind::Slices => {
            let request = v1::ListSlicesRequest::default();
            let list = async |client: &Client| client.list_slices(request.clone()).await;
            let watch = async |client: &Client| client.watch_slices(request.clone()).await;
            show.run::<_, Slices>(client, list, watch).await
        }
    }
}

struct Show<'a> {
    view: View<'a>,
    watch: bool,
    timeout: Duration,
}

impl Show<'_> {
    async fn run<M, L: Listing + From<M>>(
        &self,
        client: Client,
        list: impl AsyncFn(&Client) -> Result<M, Status>,
        watch: impl AsyncFn(&Client) -> Result<Watch<M>, Status>,
    ) -> anyhow::Result<Outcome> {
        let kind = L::Item::KIND;
        let mut list = L::from(list(&client).await?);
        let problems = self.view.filter.problems(list.items());
        for problem in &problems {
            output::warn(&format!("error: {}", problem.text(kind)));
        }
        let mut outcome = if problems.is_empty() {
            Outcome::Fine
        } else {
            Outcome::Bad
        };
        // An ambiguous name shows none of its objects.
        let is_clear = |item: &L::Item| {
            let mut ambiguous = problems.iter().filter_map(|problem| match problem {
                NoMatch::Ambiguous { name, .. } => Some(name),
                NoMatch::Unknown { .. } => None,
            });
            !ambiguous.any(|name| item.is_called(name))
        };
        list.items_mut().retain(is_clear);
        self.view.narrow(&mut list)?;
        if let Some(path) = self.view.sort_by {
            check_sort_path(list.items(), path)?;
        }
        if list.items().is_empty()
            && let Some(problem) = self.unknown_resource(kind, &client).await?
        {
            output::warn(&format!("error: {}", problem.text(Kind::Resources)));
            outcome = Outcome::Bad;
        }
        if self.watch && outcome == Outcome::Fine {
            watch::run::<M, L>(client, self.timeout, &self.view, watch).await?;
            return Ok(Outcome::Fine);
        }
        // Unknown names were reported above.
        if outcome == Outcome::Fine || !list.items().is_empty() {
            self.print(&list)?;
        }
        Ok(outcome)
    }

    /// Returns the problem if the resource of `--resource` is unknown. A DRA driver counts as a resource, because its
    /// devices are listed by its name.
    async fn unknown_resource(&self, kind: Kind, client: &Client) -> anyhow::Result<Option<NoMatch>> {
        let Some(wanted) = self.view.filter.resource else {
            return Ok(None);
        };
        let resources = client.list_resources(v1::ListResourcesRequest {}).await?;
        let resources = resources.resources.into_iter().map(|resource| resource.name);
        let mut known: Vec<String> = resources.collect();
        if kind == Kind::Devices {
            let drivers = client.list_drivers(v1::ListDriversRequest::default()).await?;
            known.extend(drivers.drivers.into_iter().map(|driver| driver.name));
        }
        if known.iter().any(|name| name == wanted) {
            return Ok(None);
        }
        Ok(Some(NoMatch::Unknown {
            name: wanted.to_owned(),
            near: near(wanted, known.into_iter()),
        }))
    }

    fn print<L: Listing>(&self, list: &L) -> anyhow::Result<()> {
        let kind = L::Item::KIND;
        let wide = self.view.is_wide();
        let is_table = matches!(self.view.output, Output::Table | Output::Wide);
        if list.items().is_empty() && is_table {
            output::warn(&self.view.filter.none(kind));
            return output::print_text(list.notes().trim_start().to_owned());
        }
        output::print(self.view.output.clone(), list, |list| match self.view.output {
            Output::Name => {
                let name = |item: &L::Item| format!("{}/{}\n", kind.one(), output::line(&item.name()));
                list.items().iter().map(name).collect()
            }
            _ => {
                let table = list.table(wide).hide_headers(self.view.no_headers);
                table.render(Screen::for_list(wide)) + &list.notes()
            }
        })
    }
}
