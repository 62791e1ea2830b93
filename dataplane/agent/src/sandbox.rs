//! What the agent gives up: files beyond those that its configuration names, system calls that it never makes, and privileges.

use crate::aggregator::AggregatorConfig;
use crate::config::Config;
use harmonaize_identity::Protection;
use landlock::{
    ABI, AccessFs, BitFlags, Compatible, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The newest Landlock whose rights are asked for; a kernel with an older one grants what it has.
const LANDLOCK: ABI = ABI::V6;

/// What libraries read at run time: their own code, and the kernel's view of processes, devices and interfaces.
const SYSTEM: [&str; 6] = ["/usr", "/lib", "/lib64", "/proc", "/sys", "/dev/urandom"];
/// What the resolver reads where a control is named, and not numbered.
const RESOLVER: [&str; 3] = ["/etc", "/run/systemd/resolve", "/run/resolvconf"];

/// System calls that the agent never makes, by what they would give to who has taken it over.
const REFUSED: [&[libc::c_long]; 6] = [
    // Another program.
    &[libc::SYS_execve, libc::SYS_execveat],
    // Other processes.
    &[
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_process_madvise,
        libc::SYS_pidfd_getfd,
        libc::SYS_kcmp,
        libc::SYS_move_pages,
        libc::SYS_migrate_pages,
    ],
    // Another view of the files.
    &[
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_pivot_root,
        libc::SYS_chroot,
        libc::SYS_setns,
        libc::SYS_unshare,
        libc::SYS_open_tree,
        libc::SYS_move_mount,
        libc::SYS_fsopen,
        libc::SYS_fsconfig,
        libc::SYS_fsmount,
        libc::SYS_fspick,
        libc::SYS_mount_setattr,
        libc::SYS_mknodat,
        libc::SYS_open_by_handle_at,
        libc::SYS_name_to_handle_at,
        libc::SYS_fanotify_init,
        libc::SYS_quotactl,
        libc::SYS_swapon,
        libc::SYS_swapoff,
    ],
    // Another kernel, or time.
    &[
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_delete_module,
        libc::SYS_kexec_load,
        libc::SYS_reboot,
        libc::SYS_syslog,
        libc::SYS_acct,
        libc::SYS_settimeofday,
        libc::SYS_clock_settime,
        libc::SYS_clock_adjtime,
        libc::SYS_adjtimex,
        libc::SYS_sethostname,
        libc::SYS_setdomainname,
    ],
    // Another user.
    &[
        libc::SYS_setuid,
        libc::SYS_setgid,
        libc::SYS_setreuid,
        libc::SYS_setregid,
        libc::SYS_setresuid,
        libc::SYS_setresgid,
        libc::SYS_setfsuid,
        libc::SYS_setfsgid,
        libc::SYS_setgroups,
    ],
    // Parts of the kernel that the agent has no use for, and that others have been broken into by.
    &[
        libc::SYS_add_key,
        libc::SYS_keyctl,
        libc::SYS_request_key,
        libc::SYS_userfaultfd,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_personality,
    ],
];

/// System calls for telemetry's programs in the kernel.
const MEASURING: [libc::c_long; 2] = [libc::SYS_bpf, libc::SYS_perf_event_open];

/// The part of a configuration that says what the process gives up.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sandbox {
    /// Whether it gives up anything.
    pub on: bool,
    /// Files and folders that it may read, beside those that its other keys need.
    pub read: Vec<PathBuf>,
    /// Folders in which it may make and change files and sockets, beside those that its other keys need.
    pub write: Vec<PathBuf>,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self { on: true, read: Vec::new(), write: Vec::new() }
    }
}

impl Sandbox {
    /// The same with relative paths made those beside the configuration's file.
    pub(crate) fn beside(self, file: &Path) -> Self {
        let folder = file.parent().unwrap_or(Path::new("."));
        let full = |paths: Vec<PathBuf>| paths.iter().map(|path| folder.join(path)).collect();
        Self { on: self.on, read: full(self.read), write: full(self.write) }
    }
}

/// What one role needs.
struct Needs {
    sandbox: Sandbox,
    measures: bool,
    rdma: bool,
    capabilities: CapabilitySet,
}

impl Needs {
    fn new(sandbox: Sandbox, control: &[String], protection: &Protection) -> Self {
        let mut needs = Self { sandbox, measures: false, rdma: false, capabilities: CapabilitySet::empty() };
        let numbered = |control: &String| control.parse::<std::net::SocketAddr>().is_ok();
        if !control.iter().all(numbered) {
            needs.sandbox.read.extend(RESOLVER.map(PathBuf::from));
        }
        if let Protection::Mutual(folder) = protection {
            needs.sandbox.read.push(folder.0.clone());
        }
        needs
    }

    fn with_rdma(mut self, verbs: bool) -> Self {
        self.rdma = verbs;
        if verbs {
            self.sandbox.read.push("/etc/libibverbs.d".into());
            self.capabilities |= CapabilitySet::IPC_LOCK;
        }
        self
    }
}

/// Takes from the process what an agent by this configuration does not need, once it has one thread. Says in the log what it could not.
pub fn confine_agent(config: &Config) {
    let mut needs =
        Needs::new(config.sandbox.clone(), &config.control, &config.protection).with_rdma(has_rdma(config));
    let Needs { sandbox, capabilities, .. } = &mut needs;
    // Editors and tools put a new file in place of the old one, so the folders are what is read.
    sandbox.read.extend(config.source.iter().flat_map(|source| &source.files).map(|file| folder(file)));
    let sockets = config.tenants.iter().filter_map(|tenant| Some(tenant.socket.as_ref()?.path.as_path()));
    let telemetry = config.telemetry.as_ref();
    let shown = telemetry.and_then(|telemetry| telemetry.socket.as_deref());
    sandbox.write.extend(sockets.chain(config.handover.as_deref()).chain(shown).map(folder));
    sandbox.write.extend(config.control_tenants.iter().map(|tenants| tenants.sockets.clone()));
    // A recording is renamed and begun anew in its folder; a device or pipe is not.
    let record = telemetry.and_then(|telemetry| telemetry.record.as_deref());
    let special = |path: &Path| std::fs::metadata(path).is_ok_and(|found| !found.is_file());
    sandbox.write.extend(record.map(|path| if special(path) { path.to_owned() } else { folder(path) }));
    // To give a socket to its tenant's user, in a folder of his; to trace routes; for the priority of probes; and small ports.
    *capabilities |= CapabilitySet::CHOWN
        | CapabilitySet::FOWNER
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::NET_RAW
        | CapabilitySet::SYS_NICE
        | CapabilitySet::NET_BIND_SERVICE;
    if telemetry.is_some() {
        *capabilities |= CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::NET_ADMIN;
    }
    *capabilities |= for_congestion(config);
    needs.measures = telemetry.is_some();
    confine(&needs);
}

/// The same for an aggregator.
pub fn confine_aggregator(config: &AggregatorConfig) {
    let needs = Needs::new(config.sandbox.clone(), &config.control, &config.protection);
    let mut needs = needs.with_rdma(config.verbs.is_some());
    needs.capabilities |= CapabilitySet::NET_BIND_SERVICE;
    // It is read again while the aggregator runs.
    needs.sandbox.read.extend(config.source.iter().map(|file| folder(file)));
    confine(&needs);
}

/// The folder that a file is in.
fn folder(file: &Path) -> PathBuf {
    match file.parent() {
        Some(folder) if folder.as_os_str().is_empty() => PathBuf::from("."),
        Some(folder) => folder.to_owned(),
        None => file.to_owned(),
    }
}

/// Between agents, or with tenants.
fn has_rdma(config: &Config) -> bool {
    config.verbs.is_some() || config.rdma.is_some()
}

/// Congestion control that is not for everybody takes a privilege.
fn for_congestion(config: &Config) -> CapabilitySet {
    config.congestion.as_ref().map_or(CapabilitySet::empty(), |_| CapabilitySet::NET_ADMIN)
}

/// Whether the engine's threads may set what only an administrator of the network may.
pub(crate) fn engines_administer(config: &Config) -> bool {
    let kept = !config.sandbox.on || has_rdma(config) || !for_congestion(config).is_empty();
    let own = || capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_ADMIN));
    kept && own()
}

fn confine(needs: &Needs) {
    if !needs.sandbox.on {
        return tracing::warn!("the sandbox is off; whoever takes over this process has all that it has");
    }
    if needs.rdma {
        // What a device reaches is pinned; the right to pin more than the limit goes with the others.
        let _ = rustix::process::setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
    }
    let capabilities = keep_capabilities(needs.capabilities);
    let files = restrict_files(&needs.sandbox, needs.rdma);
    let measuring = if needs.measures { &[][..] } else { &MEASURING[..] };
    let calls = refuse_calls(measuring);
    match &files {
        Ok(RestrictionStatus { ruleset: RulesetStatus::NotEnforced, .. }) => tracing::warn!(
            "this kernel has no Landlock (Linux 5.13), so the agent could open every file that its user may"
        ),
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "files beyond the configuration's are not out of reach"),
    }
    if let Err(error) = &calls {
        tracing::warn!(%error, "system calls that the agent never makes are not refused");
    }
    if let Err(error) = &capabilities {
        tracing::warn!(%error, "privileges that the agent does not need stay with it");
    }
    let whole = matches!(&files, Ok(status) if status.ruleset != RulesetStatus::NotEnforced);
    tracing::info!(files = whole, calls = calls.is_ok(), capabilities = capabilities.is_ok(), "sandbox");
}

/// Runs `work` on a thread without privileges, so that all threads which it starts have none. Where the sandbox is off it is a plain call.
/// Where there is RDMA they keep the process's: the kernel refuses verbs to a thread whose credentials are not those by which the
/// device was opened (`ib_safe_file_access`), and to give up a capability is to change them.
pub(crate) fn without_privileges<T: Send>(config: &Config, work: impl FnOnce() -> T + Send) -> T {
    if !config.sandbox.on {
        return work();
    }
    let confined = || {
        let gone = match has_rdma(config) {
            true => Ok(()),
            false => keep_capabilities(for_congestion(config)).map_err(anyhow::Error::from),
        };
        if let Err(error) = gone
            .and_then(|()| Ok(filter(&MEASURING, libc::EPERM)?))
            .and_then(|program| Ok(seccompiler::apply_filter(&program)?))
        {
            tracing::warn!(%error, "the engine's threads keep privileges that they do not need");
        }
        work()
    };
    std::thread::scope(|scope| match scope.spawn(confined).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Gives up all capabilities of this thread but these, as far as it has them.
fn keep_capabilities(kept: CapabilitySet) -> rustix::io::Result<()> {
    let had = capabilities(None)?;
    if had.permitted.is_empty() && had.inheritable.is_empty() {
        return Ok(());
    }
    if had.effective.contains(CapabilitySet::SETPCAP) {
        // Beyond the last one that the kernel has it answers EINVAL.
        for lost in CapabilitySet::all().difference(kept).iter() {
            let _ = remove_capability_from_bounding_set(lost);
        }
    }
    // From Linux 4.3 on; without it they are none.
    let _ = clear_ambient_capability_set();
    let permitted = had.permitted & kept;
    set_capabilities(
        None,
        CapabilitySets {
            effective: had.effective & permitted,
            permitted,
            inheritable: CapabilitySet::empty(),
        },
    )
}

/// Has the kernel refuse all files but these, to this thread and those that it starts.
fn restrict_files(sandbox: &Sandbox, rdma: bool) -> Result<RestrictionStatus, RulesetError> {
    let reads = AccessFs::ReadFile | AccessFs::ReadDir;
    let writes = reads
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::RemoveFile;
    let device: BitFlags<AccessFs> = reads | AccessFs::WriteFile | AccessFs::IoctlDev;
    let devices: &[&str] = if rdma { &["/dev/infiniband"] } else { &[] };
    Ruleset::default()
        .set_compatibility(landlock::CompatLevel::BestEffort)
        .handle_access(<AccessFs as landlock::Access>::from_all(LANDLOCK))?
        .scope(Scope::Signal)?
        .create()?
        .add_rules(path_beneath_rules(SYSTEM, reads))?
        .add_rules(path_beneath_rules(&sandbox.read, reads))?
        .add_rules(path_beneath_rules(&sandbox.write, writes))?
        .add_rules(path_beneath_rules(["/dev/null"], reads | AccessFs::WriteFile))?
        .add_rules(path_beneath_rules(devices, device))?
        .restrict_self()
}

/// Why system calls could not be refused.
#[derive(Debug, thiserror::Error)]
enum CallsError {
    #[error(transparent)]
    Build(#[from] seccompiler::BackendError),
    #[error(transparent)]
    Apply(#[from] seccompiler::Error),
}

/// Has the kernel refuse these system calls, and those that no agent makes, to all threads.
fn refuse_calls(others: &[libc::c_long]) -> Result<(), CallsError> {
    let refused: Vec<_> = REFUSED.into_iter().flatten().chain(others).copied().collect();
    apply_filter_all_threads(&filter(&refused, libc::EPERM)?)?;
    // Its flags lie in memory, where no filter looks. Who is answered that it is not there uses `clone`.
    apply_filter_all_threads(&filter(&[libc::SYS_clone3], libc::ENOSYS)?)?;
    Ok(apply_filter_all_threads(&new_namespaces()?)?)
}

/// A program that answers these calls with an error, and lets all others pass.
fn filter(calls: &[libc::c_long], errno: i32) -> Result<BpfProgram, seccompiler::BackendError> {
    program(calls.iter().map(|call| (*call, Vec::new())).collect(), errno)
}

/// The same for `clone` with a flag that asks for a namespace.
fn new_namespaces() -> Result<BpfProgram, seccompiler::BackendError> {
    let flags = [
        libc::CLONE_NEWNS,
        libc::CLONE_NEWCGROUP,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
    ];
    let with = |flag: libc::c_int| {
        let flag = u64::from(flag.unsigned_abs());
        let condition =
            SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(flag), flag)?;
        SeccompRule::new(vec![condition])
    };
    let rules = flags.into_iter().map(with).collect::<Result<_, _>>()?;
    program(BTreeMap::from([(libc::SYS_clone, rules)]), libc::EPERM)
}

fn program(
    rules: BTreeMap<libc::c_long, Vec<SeccompRule>>,
    errno: i32,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let answer = SeccompAction::Errno(errno.unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, answer, architecture)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    /// What `/proc/thread-self/status` says.
    fn status(name: &str) -> String {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().to_owned()
    }

    #[test]
    fn files_beyond_the_named_are_out_of_reach() {
        let folder = tempfile::tempdir().unwrap();
        let (named, other) = (folder.path().join("named"), folder.path().join("other"));
        std::fs::create_dir(&named).unwrap();
        std::fs::write(&other, "secret").unwrap();
        let sandbox = Sandbox { write: vec![named.clone()], ..Sandbox::default() };
        let check = || {
            if restrict_files(&sandbox, false).unwrap().ruleset == RulesetStatus::NotEnforced {
                return harmonaize_testkit::strict::skip_test("this kernel has no Landlock");
            }
            let error = std::fs::read(&other).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
            assert!(std::fs::write(folder.path().join("new"), "").is_err());
            std::fs::write(named.join("part"), "text").unwrap();
            std::fs::rename(named.join("part"), named.join("file")).unwrap();
            drop(std::os::unix::net::UnixListener::bind(named.join("socket")).unwrap());
            std::fs::remove_file(named.join("socket")).unwrap();
        };
        std::thread::scope(|scope| scope.spawn(check).join().unwrap());
        assert_eq!(std::fs::read_to_string(other).unwrap(), "secret");
    }

    #[test]
    fn threads_without_privileges_have_none_and_give_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.toml");
        let text = "host = \"h0\"\ncontrol = \"127.0.0.1:7000\"\ninsecure_loopback = true\nlisten = \"127.0.0.1:0\"\n";
        let read = |more: &str| Config::parse(&path, &format!("{text}{more}")).unwrap();
        let before = status("CapEff");
        let nested = || std::thread::spawn(|| (status("CapEff"), status("CapPrm"), status("Seccomp")));
        let (effective, permitted, seccomp) = without_privileges(&read(""), || nested().join().unwrap());
        assert_eq!(
            (u64::from_str_radix(&effective, 16), u64::from_str_radix(&permitted, 16)),
            (Ok(0), Ok(0))
        );
        assert_eq!(seccomp, "2");
        let off = without_privileges(&read("[sandbox]\non = false\n"), || status("CapEff"));
        assert_eq!([off, status("CapEff")], [before.clone(), before]);
    }

    #[test]
    fn refused_calls_fail_and_threads_still_start() {
        let check = || {
            // This thread's alone: other tests go on as they are.
            for program in [filter(&[libc::SYS_setns, libc::SYS_unshare], libc::EPERM), new_namespaces()] {
                seccompiler::apply_filter(&program.unwrap()).unwrap();
            }
            seccompiler::apply_filter(&filter(&[libc::SYS_clone3], libc::ENOSYS).unwrap()).unwrap();
            let own = std::fs::File::open("/proc/self/ns/net").unwrap();
            let moved = rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&own),
                Some(rustix::thread::LinkNameSpaceType::Network),
            );
            assert_eq!(moved, Err(Errno::PERM));
            assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
        };
        std::thread::scope(|scope| scope.spawn(check).join().unwrap());
        let all: Vec<_> = REFUSED.into_iter().flatten().chain(&MEASURING).copied().collect();
        assert!(!filter(&all, libc::EPERM).unwrap().is_empty());
    }
}
