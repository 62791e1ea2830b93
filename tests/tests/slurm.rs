//! Debian's Slurm hands hosts out, and control says which of them a job should have: `harmonaize slurm`, then ranks under `srun`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_testkit::namespace::Namespace;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::workspace::{Binaries, Profile};
use harmonaize_testkit::{packages, strict};
use harmonaize_tests::job::deploy;
use harmonaize_tests::star;
use std::fs;
use std::process::{Command, Output, Stdio};

/// What is run of Slurm.
const PROGRAMS: [&str; 5] = ["slurmctld", "slurmd", "sinfo", "scontrol", "srun"];

/// A task's agent is that of its node.
const TASK: &str = r#"export HARMONAIZE_SOCKET="$0/$SLURMD_NODENAME/a/agent.sock"; exec "$@""#;

/// Slurm on the hosts of a deployment, with its controller beside control.
struct Slurm {
    // In this order they end: daemons, then what they write into.
    _daemons: Vec<Process>,
    folder: tempfile::TempDir,
    namespace: Namespace,
}

impl Slurm {
    fn start(deployment: &Deployment) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let machine = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let machine = machine.trim().split('.').next().unwrap();
        let mut config = format!(
            "ClusterName=test\nSlurmctldHost={machine}({control})\nSlurmUser=root\nAuthType=auth/none\nCredType=cred/none\n\
             StateSaveLocation={here}/state\nSlurmdSpoolDir={here}/%n\nSlurmctldPidFile={here}/slurmctld.pid\n\
             SlurmdPidFile={here}/%n.pid\nProctrackType=proctrack/pgid\nTaskPlugin=task/none\nSwitchType=switch/none\n\
             MpiDefault=none\nSlurmdParameters=config_overrides\nPartitionName=all Nodes=ALL Default=YES\n",
            control = deployment.fabric().control_address(),
            here = folder.path().display(),
        );
        for host in deployment.hosts() {
            let (name, address) = (&host.name, host.management);
            config += &format!("NodeName={name} NodeHostname={machine} NodeAddr={address} CPUs=1\n");
            fs::create_dir(path(name)).unwrap();
        }
        fs::create_dir(path("state")).unwrap();
        fs::write(path("slurm.conf"), config).unwrap();
        fs::write(path("cgroup.conf"), "IgnoreSystemdOnFailure=yes\n").unwrap();
        let start = |program: &str, name: &str, more: &[&str], namespace: &Namespace| {
            let mut command = Command::new(program);
            command.arg("-D").args(more).env("SLURM_CONF", path("slurm.conf"));
            Process::start(name, &mut command, namespace, &path(&format!("{name}.log"))).unwrap()
        };
        let namespace = deployment.fabric().control();
        let mut daemons = vec![start("slurmctld", "slurmctld", &[], &namespace)];
        for host in deployment.hosts() {
            let name = format!("slurmd of {}", host.name);
            daemons.push(start("slurmd", &name, &["-N", &host.name], &host.namespace));
        }
        Self { _daemons: daemons, folder, namespace }
    }

    /// Runs a command beside Slurm's controller.
    fn run(&self, command: &mut Command) -> Output {
        command.env("SLURM_CONF", self.folder.path().join("slurm.conf")).stdin(Stdio::null());
        self.namespace.enter(|| command.output()).unwrap().unwrap()
    }

    /// What a command that succeeds prints.
    fn text(&self, command: &mut Command) -> String {
        let output = self.run(command);
        let (text, error) = texts(&output);
        assert!(output.status.success(), "{command:?}: {text}\n{error}\n{}", self.logs());
        text
    }

    /// What `srun` prints of a command on these nodes, a task on each.
    fn srun(&self, deployment: &Deployment, nodes: &str, command: &[&str]) -> String {
        let mut srun = Command::new("srun");
        srun.args(["--nodes=2", "--ntasks-per-node=1", "--nodelist", nodes, "sh", "-c", TASK]);
        self.text(srun.arg(deployment.fabric().folder()).args(command))
    }

    /// `harmonaize slurm nodes`, for two workers.
    fn nodes(&self, deployment: &Deployment) -> Output {
        let mut command = Command::new(deployment.binaries().path("harmonaize").unwrap());
        command.env("HARMONAIZE_CONTROL", deployment.operators_address().to_string());
        command.arg("--tls").arg(deployment.operator());
        self.run(command.args(["slurm", "nodes", "--workers", "2", "--tenant", "a"]))
    }

    /// What its programs say, for an error.
    fn logs(&self) -> String {
        let logs = fs::read_dir(self.folder.path()).unwrap().flatten().map(|entry| entry.path());
        let logs = logs.filter(|path| path.extension().is_some_and(|ending| ending == "log"));
        logs.map(|path| format!("{}:\n{}", path.display(), fs::read_to_string(&path).unwrap_or_default()))
            .collect()
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn ranks_run_where_control_has_slurm_start_them() {
    let missing: Vec<&str> =
        PROGRAMS.into_iter().filter(|program| packages::on_path(program).is_none()).collect();
    if !missing.is_empty() {
        return strict::skip_test(format!("{missing:?} of Debian's package slurm-wlm are missing"));
    }
    let allocates = |setup: &mut Setup| {
        setup.binaries = Binaries::build_with(Profile::Dev, &["harmonaize-perf"]).unwrap();
        setup.control += "[allocator]\npolicy = \"fifo\"\nround = \"2s\"\n";
    };
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), allocates) else { return };
    let slurm = Slurm::start(&deployment);
    let all_idle = |_: &Deployment| {
        let output =
            slurm.run(Command::new("sinfo").args(["--noheader", "--Node", "--format", "%N %T %P %a"]));
        Ok((texts(&output).0 == "h0 idle all* up\nh1 idle all* up\nh2 idle all* up\n").then_some(()))
    };
    let idle = deployment.wait_until("Slurm has no three idle nodes", all_idle);
    idle.unwrap_or_else(|error| panic!("{error:#}\n{}", slurm.logs()));

    deployment.harmonaize(&["drain", "h0"]).unwrap();
    let output = slurm.nodes(&deployment);
    let (nodes, left_out) = texts(&output);
    assert_eq!(nodes, "h[1-2]\n", "{left_out}");
    assert_eq!(left_out, "harmonaize: left out, drained or under maintenance: h0\n");
    let nodes = nodes.trim_end();

    // The program's ranks are those of Slurm.
    let path = |program: &str| deployment.binaries().path(program).unwrap().to_str().unwrap().to_owned();
    let perf = path("harmonaize-perf");
    let text = slurm.srun(&deployment, nodes, &[&perf, "all_reduce", "-b", "1K", "-e", "1K", "-n", "3"]);
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");

    // Control gives a worker its rank, whatever Slurm has said.
    let harmonaize = path("harmonaize");
    let runner = [&*harmonaize, "tenant", "run", "--job", "slurm", "--workers", "2", "--"];
    let worker = ["sh", "-c", "echo $RANK of $WORLD_SIZE on $SLURMD_NODENAME"];
    let text = slurm.srun(&deployment, nodes, &[&runner[..], &worker].concat());
    // Its runner says when the job is over, too.
    let mut lines: Vec<&str> = text.lines().filter(|line| line.contains(" of ")).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["0 of 2 on h1", "1 of 2 on h2"]);

    slurm.text(Command::new("scontrol").args(["update", "nodename=h2", "state=drain", "reason=test"]));
    let output = slurm.nodes(&deployment);
    let (nodes, error) = texts(&output);
    assert_eq!((output.status.code(), nodes.as_str()), (Some(1), ""), "{error}");
    assert!(error.contains("harmonaize: of 1 node the job would get none: "), "{error}");
}
