//! The machine's own test: what goes wrong in a guest, or with it, is seen outside as what it is.

use super::{base, machine};
use crate::vm::initramfs::Image;
use crate::vm::kernel::Kernel;
use crate::vm::machine::GuestOutcome;
use crate::vm::programs::{self, Userland};
use anyhow::{Result, bail};
use harmonaize_guest::{Job, Mark, Status, Step};
use std::time::Duration;

/// A boot takes two seconds, and several times that on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// Too short for the guest that sleeps.
const TOO_SHORT: Duration = Duration::from_secs(2);

/// Boots guests with steps that fail in every way, with a kernel that dies, and with no end.
pub(super) fn check(kernel: &Kernel, kvm: bool) -> Result<()> {
    let steps = vec![
        step("code", "exit 3", 30),
        step("signal", "kill -9 $$", 30),
        step("sleep", "sleep 600", 1),
        Step::new("absent", &["/usr/bin/absent"], Duration::from_secs(30)),
        step("fine", "exit 0", 30),
    ];
    let (outcome, ends) = boot(kernel, kvm, steps, LIMIT)?;
    let expected = [
        ("code", Status::Code(3)),
        ("signal", Status::Signal(9)),
        ("sleep", Status::TimedOut),
        ("absent", Status::NotStarted),
        ("fine", Status::Code(0)),
    ];
    let expected: Vec<(String, Status)> =
        expected.into_iter().map(|(name, status)| (name.to_owned(), status)).collect();
    if ends != expected || outcome != GuestOutcome::Done(4) {
        bail!("the guest's steps ended as {ends:?}, {outcome:?}; expected {expected:?} and 4 failures");
    }
    let crash = "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger; sleep 600";
    let (outcome, ends) = boot(kernel, kvm, vec![step("crash", crash, 60)], LIMIT)?;
    if !matches!(outcome, GuestOutcome::Died(_)) || !ends.is_empty() {
        bail!("a kernel that died was reported as {outcome:?}, {ends:?}");
    }
    let (outcome, ends) = boot(kernel, kvm, vec![step("long", "sleep 600", 600)], TOO_SHORT)?;
    if outcome != GuestOutcome::TimedOut || !ends.is_empty() {
        bail!("a guest past its limit was reported as {outcome:?}, {ends:?}");
    }
    Ok(())
}

fn step(name: &str, script: &str, seconds: u64) -> Step {
    Step::new(name, &["/usr/bin/busybox", "sh", "-c", script], Duration::from_secs(seconds))
}

/// Boots a guest without hosts; how it ended, and how its steps did.
fn boot(
    kernel: &Kernel,
    kvm: bool,
    steps: Vec<Step>,
    limit: Duration,
) -> Result<(GuestOutcome, Vec<(String, Status)>)> {
    let mut tree = base(kernel)?;
    programs::add_installed(&mut tree, &Userland::here(), "busybox")?;
    for applet in ["sleep", "kill"] {
        tree.link(&format!("/usr/bin/{applet}"), "busybox");
    }
    let names: Vec<String> = steps.iter().map(|step| step.name.clone()).collect();
    let image = Image::write(&mut tree, &Job { steps, ..Job::default() }, "outcomes")?;
    let mut ends = Vec::new();
    let outcome = machine(kernel, image.path(), kvm).run(limit, |line| {
        if let Some(Mark::End { name, status, .. }) = Mark::find(line)
            && names.contains(&name)
        {
            ends.push((name, status));
        }
    })?;
    Ok((outcome, ends))
}
