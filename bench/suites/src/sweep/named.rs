//! The sweep on hosts by their names. `harmonaize-perf` runs through the agents there, beside Open MPI as it is installed there.

use super::{Budget, Collective, Entry, Role, Setting, Site, iterations, write};
use crate::hosts::{self, Hosts, OpenMpi};
use crate::part::{self, Outcome};
use crate::peers::PeerRun;
use crate::runs::interleave;
use crate::suite::Request;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;

/// Who takes part, with what libraries are called in charts.
const CONTESTANTS: [(&str, Role); 3] =
    [("ours", Role::Ours), ("Open MPI", Role::Peer), ("Open MPI with UCC", Role::Peer)];

/// The command of ours, a size.
fn ours(hosts: &Hosts, collective: &Collective, bytes: u64) -> Vec<String> {
    let operations = iterations(bytes);
    let warm_up = (operations / 10).clamp(1, 20);
    let arguments = format!("-b {bytes} -e {bytes} -n {operations} -w {warm_up} -z 2");
    hosts.perf(hosts.count(), collective.name, &arguments)
}

/// The command of Open MPI's ranks, for all sizes.
fn mpi(hosts: &Hosts, mpi: &OpenMpi, ucc: bool, collective: &Collective, sizes: &[u64]) -> Vec<String> {
    let sizes: Vec<(u64, u32)> = sizes.iter().map(|bytes| (*bytes, iterations(*bytes))).collect();
    hosts.mpi(mpi, ucc, &PeerRun { collective: collective.name, ranks: hosts.count(), sizes: &sizes })
}

/// Refuses what hosts by their names do not have.
fn check(request: &Request) -> Result<()> {
    part::check_names("sweep by hosts' names", &[], &request.only)?;
    ensure!(request.ranks.is_empty(), "by --hosts the sweep has a rank on each of them: leave --ranks out");
    ensure!(request.types.is_empty(), "the sweep is of f32, as its peers' programs are: leave --types out");
    Ok(())
}

/// What would run, a command a line, with what each host needs above.
///
/// # Errors
/// Where an option is given that does not go with hosts.
pub fn commands(request: &Request, hosts: &Hosts) -> Result<String> {
    check(request)?;
    let budget = Budget::of(request);
    let (mut text, open_mpi) = (hosts.needs(), OpenMpi::assumed());
    for collective in &budget.collectives {
        text += &format!("\n# {}, in turn\n# ours\n", collective.name);
        text.extend(budget.sizes.iter().map(|bytes| hosts::shown(&ours(hosts, collective, *bytes))));
        for (ucc, name) in [(false, "Open MPI"), (true, "Open MPI with UCC")] {
            let command = mpi(hosts, &open_mpi, ucc, collective, &budget.sizes);
            text += &format!("# {name}\n{}", hosts.shown_on(0, &command));
        }
    }
    Ok(text)
}

/// Sweeps. What was measured is written after each collective.
///
/// # Errors
/// Where an option does not go with hosts, a host cannot be reached or lacks the program or the socket, or the report cannot be
/// written. A contestant that fails is a row, and one that no host has is left out.
pub fn run(request: &Request, hosts: &Hosts) -> Result<Outcome> {
    check(request)?;
    hosts.check()?;
    let open_mpi = hosts.open_mpi().inspect_err(|error| eprintln!("NOT THERE: Open MPI: {error:#}")).ok();
    let budget = Budget::of(request);
    let folder = super::folder(request);
    let mut settings = Vec::new();
    for collective in &budget.collectives {
        let setting = setting(hosts, open_mpi.as_ref(), collective, &budget)?;
        settings.push(setting);
        let [csv, html] = write(&folder, &settings)?;
        eprintln!("written: {} and {}", csv.display(), html.display());
    }
    Ok(Outcome::from(settings.iter().flat_map(Setting::rows).collect::<Vec<_>>()))
}

/// Runs the contestants of a collective in turn.
fn setting(
    hosts: &Hosts,
    open_mpi: Option<&OpenMpi>,
    collective: &'static Collective,
    budget: &Budget,
) -> Result<Setting> {
    let peers = open_mpi.map_or(0, |mpi| 1 + usize::from(mpi.ucc));
    let taking_part = CONTESTANTS.iter().take(1 + peers);
    let entries: Vec<Entry> = taking_part.map(|(name, role)| Entry::new(name, name, *role)).collect();
    let (ranks, sizes) = (hosts.count(), budget.sizes.clone());
    let mut setting = Setting { site: Site::Hosts, ranks, collective, sizes, entries };
    eprintln!("{}", setting.title());
    let (count, sizes) = (setting.entries.len(), &budget.sizes);
    interleave(budget.rounds, count, |which| {
        let entry = setting.entries.get_mut(which).context("no such contestant")?;
        if entry.failed.is_some() {
            return Ok(());
        }
        entry.record(figures(hosts, open_mpi, which, collective, sizes));
        Ok(())
    })?;
    Ok(setting)
}

/// One round of a contestant: microseconds by size.
fn figures(
    hosts: &Hosts,
    open_mpi: Option<&OpenMpi>,
    which: usize,
    collective: &Collective,
    sizes: &[u64],
) -> Result<BTreeMap<u64, f64>> {
    if which == 0 {
        let time = |bytes: &u64| {
            let told = hosts.measure(&ours(hosts, collective, *bytes))?;
            let p50 = told.get("p50_us").and_then(serde_json::Value::as_f64);
            Ok((*bytes, p50.with_context(|| format!("no time for {bytes} bytes in {told}"))?))
        };
        return sizes.iter().map(time).collect();
    }
    let open_mpi = open_mpi.context("no Open MPI")?;
    let command = mpi(hosts, open_mpi, which == 2, collective, sizes);
    let figures = hosts.run_mpi(&command)?;
    Ok(figures.into_iter().map(|figure| (figure.bytes, figure.p50_us)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::tests::request;
    use harmonaize_testkit::golden;

    #[test]
    fn a_dry_run_shows_every_command() {
        let shown = commands(&request(&["--sizes", "1K,1M", "--collectives", "alltoall"]), &hosts::pair());
        golden::same("bench/suites/tests/golden/sweep-hosts.txt", &shown.unwrap());
    }

    #[test]
    fn a_collective_is_swept_through_the_program_that_is_there() {
        let (_folder, hosts) = hosts::written("{\"p50_us\": 12.5}");
        let budget = Budget::of(&request(&["--sizes", "1K,4K", "--rounds", "3"]));
        let setting = setting(&hosts, None, budget.collectives[0], &budget).unwrap();
        let rows = setting.rows();
        assert_eq!(setting.entries.len(), 1);
        assert_eq!(
            rows.iter().map(|row| (row.size, row.ours)).collect::<Vec<_>>(),
            [(1024, Some(12.5)), (4096, Some(12.5))]
        );
        assert!(rows.iter().all(|row| row.runs == 3 && row.pass.is_none()), "{rows:?}");
        assert!(rows[0].case.contains("hosts of a testbed, 2 ranks"), "{rows:?}");
    }

    #[test]
    fn what_hosts_do_not_have_is_refused() {
        let refused = |words: &[&str]| commands(&request(words), &hosts::pair()).unwrap_err().to_string();
        assert!(refused(&["--ranks", "4"]).contains("leave --ranks out"));
        assert!(refused(&["--types", "half"]).contains("leave --types out"));
        assert!(refused(&["--only", "shaped"]).contains("leave --only out"));
    }
}
