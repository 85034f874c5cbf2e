//! The DRA cases: pods with claims are admitted and removed.

use std::path::{Path, PathBuf};

use crate::bare::BareClaims;
use crate::cases::{Bench, CALLERS, KUBELET, RESOURCE, progress};
use crate::clock::Samples;
use crate::devlet::Devlet;
use crate::driver::Registered;
use crate::kubelet::WithClaims;
use crate::noise::settled;
use crate::plugin;
use crate::process::Process;
use crate::report::{Bar, Row, Unit, number};

const ONE: &str = "one.bench.devlet.dev";
const TWO: &str = "two.bench.devlet.dev";

impl Bench {
    pub(crate) async fn claims(&mut self) -> anyhow::Result<()> {
        let bare = self.work.join("bare-claims");
        let [caller, driver] = ["caller.sock", "driver.sock"].map(|name| bare.join(name));
        drive(&mut self.peer, ONE, &caller, None).await?;
        drive(&mut self.plugin, ONE, &driver, None).await?;
        let mut bare = BareClaims::new(&caller, &driver, &self.work.join("bare-claims-file")).await?;
        let mut empty = self.devlet_with_claims(0).await?;
        let mut bare_all = Samples::default();
        let mut empty_all = Samples::default();
        for level in self.plan.claims.clone() {
            let shown = match level {
                0 => "none".to_owned(),
                _ => number(level as f64),
            };
            progress(&format!("claims held: {shown}"));
            let mut kubelet = self.kubelet_with_claims(level).await?;
            let mut devlet = match level {
                // No third node: the empty one exists already.
                0 => None,
                _ => Some(self.devlet_with_claims(level).await?),
            };
            let theirs_per_round = match level {
                0..=100 => 20,
                101..=1_000 => 10,
                _ => 5,
            };
            let (mut theirs, mut ours, mut none) =
                (Samples::default(), Samples::default(), Samples::default());
            for round in 1..=self.plan.rounds {
                progress(&format!("  round {round} of {}", self.plan.rounds));
                theirs.extend(kubelet.pairs(theirs_per_round).await?);
                settled(kubelet.pid()).await;
                if let Some(devlet) = &mut devlet {
                    ours.extend(devlet.claim_pairs(self.plan.samples, ONE).await?);
                }
                none.extend(empty.claim_pairs(self.plan.samples, ONE).await?);
                bare_all.extend(bare.measure(self.plan.samples).await?);
                self.bare_round().await?;
            }
            empty_all.append(&none);
            let none = none.summary();
            let ours = match devlet {
                Some(_) => ours.summary(),
                None => none,
            };
            self.rows.push(Row::medians(
                format!("prepare and unprepare a claim, {shown} held"),
                ours,
                KUBELET,
                theirs.summary(),
                self.plan
                    .bar_of(level, &[(0, 1.2), (5_000, 30.0), (10_000, 50.0)]),
            ));
            if level == 5_000 || !self.plan.judged && Some(&level) == self.plan.claims.last() {
                self.rows.push(Row::medians(
                    format!("prepare and unprepare a claim, {shown} held compared with none"),
                    ours,
                    "devlet, none held,",
                    none,
                    Some(Bar::AtMost(1.3)),
                ));
            }
            if let Some(devlet) = &mut devlet
                && level == self.plan.loop_level
            {
                self.callers_with_claims(&mut kubelet, devlet, &shown).await?;
            }
            kubelet.kill().await?;
        }
        self.rows.push(Row::medians(
            "prepare and unprepare a claim, none held",
            empty_all.summary(),
            "four bare round trips and three syncs",
            bare_all.summary(),
            Some(Bar::AtMost(1.8)),
        ));
        Ok(())
    }

    /// Measures many callers that admit and remove pods, each with a claim of both drivers.
    async fn callers_with_claims(
        &mut self,
        kubelet: &mut WithClaims,
        devlet: &mut Devlet,
        held: &str,
    ) -> anyhow::Result<()> {
        let (mut theirs, mut ours) = (0.0, 0.0);
        for round in 1..=self.plan.rounds {
            progress(&format!(
                "  {CALLERS} callers, round {round} of {}",
                self.plan.rounds
            ));
            theirs += kubelet.pairs_per_second(CALLERS, self.plan.loop_time).await?;
            settled(kubelet.pid()).await;
            let time = self.plan.loop_time;
            ours += devlet.claim_pairs_per_second(CALLERS, time, &[ONE, TWO]).await?;
        }
        let rounds = self.plan.rounds as f64;
        self.rows.push(Row::new(
            format!("{CALLERS} callers, pods with a claim of two drivers, {held} held"),
            Unit::PairsPerSecond,
            ours / rounds,
            KUBELET,
            theirs / rounds,
            self.plan.bar(Bar::AtLeast(30.0)),
        ));
        Ok(())
    }

    /// Starts a kubelet with `held` pods with claims, and both drivers.
    async fn kubelet_with_claims(&mut self, held: usize) -> anyhow::Result<WithClaims> {
        let directory = self.fresh("claims");
        let mut drivers = Vec::new();
        for name in [ONE, TWO] {
            let endpoint = directory.join("plugins").join(name).join("dra.sock");
            drive(&mut self.plugin, name, &endpoint, None).await?;
            drivers.push(Registered { name, endpoint });
        }
        self.kubelet.with_claims(&directory, &drivers, held).await
    }

    /// Starts a devlet with `held` pods with claims, and both drivers.
    async fn devlet_with_claims(&mut self, held: usize) -> anyhow::Result<Devlet> {
        let root = self.fresh("devlet");
        let mut devlet = self.devlet.start(&root, RESOURCE).await?;
        let registry: PathBuf = devlet.root().join("plugins_registry");
        for name in [ONE, TWO] {
            let endpoint = devlet.root().join("plugins").join(name).join("dra.sock");
            drive(&mut self.plugin, name, &endpoint, Some(&registry)).await?;
        }
        devlet.fill_claims(held, ONE).await?;
        Ok(devlet)
    }
}

async fn drive(
    process: &mut Process,
    driver: &str,
    endpoint: &Path,
    registry: Option<&Path>,
) -> anyhow::Result<()> {
    let command = plugin::Command::Drive {
        driver: driver.to_owned(),
        endpoint: endpoint.to_owned(),
        registry: registry.map(Path::to_owned),
    };
    plugin::ask(process, &command).await.map(drop)
}
