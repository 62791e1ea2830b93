//! What a configuration says, and what is wrong with it.

use super::*;
use crate::session::Quota;
use harmonaize_identity::{Folder, ProtectionError};
use harmonaize_transport::tcp::{Dscp, LinkProtection};
use std::io::ErrorKind;

const GOOD: &str =
    "host = \"h0\"\ncontrol = \"127.0.0.1:7000\"\nlisten = \"127.0.0.1:0\"\ninsecure_loopback = true\n";

fn error(text: &str) -> String {
    Config::parse(Path::new("agent.toml"), text).unwrap_err().to_string()
}

/// What is wrong with a value of this configuration.
fn value(text: &str) -> ValueError {
    match Config::parse(Path::new("agent.toml"), text).unwrap_err() {
        ConfigError::Value { error, .. } => error,
        other => panic!("{other}"),
    }
}

#[test]
fn defaults_and_units() {
    let tenant = "[[tenant]]\nname = \"a\"\nsocket = \"/run/a.sock\"\nuids = [1000]\narena = \"256MiB\"\nregions = 7\noperation_timeout = \"2h\"\n";
    let text = format!("{GOOD}spin = \"20us\"\n{tenant}");
    let config = Config::parse(Path::new("agent.toml"), &text).unwrap();
    assert_eq!(config.spin, Duration::from_micros(20));
    assert_eq!(config.peer_timeout, Duration::from_secs(5));
    assert_eq!((config.tenants[0].quota.arena_bytes, config.tenants[0].quota.regions), (256 << 20, 7));
    assert_eq!(config.tenants[0].quota.operation_timeout, Duration::from_secs(7200));
}

#[test]
fn a_table_asks_for_rdma() {
    let parse = |text: &str| Config::parse(Path::new("agent.toml"), &format!("{GOOD}{text}"));
    assert_eq!(parse("").unwrap().verbs, None);
    assert_eq!(parse("[verbs]\n").unwrap().verbs, Some(Verbs::default()));
    let full =
        "[verbs]\ndevices = [\"mlx5_0:1\"]\ngid_index = 3\nmtu = 4096\ntraffic_class = 106\nretries = 6\n";
    let verbs = parse(full).unwrap().verbs.unwrap();
    assert_eq!((verbs.devices, verbs.gid_index), (vec!["mlx5_0:1".to_owned()], Some(3)));
    let refused = |line: &str| value(&format!("{GOOD}[verbs]\n{line}\n"));
    assert!(matches!(refused("retries = 7"), ValueError::Rdma(RdmaError::Retries { retries: 7, .. })));
    assert!(matches!(refused("timeout = 0"), ValueError::Rdma(RdmaError::Timeout { timeout: 0, .. })));
    assert!(parse("[verbs]\ngid = 7\n").unwrap_err().to_string().contains("line 6"));
}

#[test]
fn threads_of_the_engine_are_in_range() {
    let threads = |line: &str| {
        let parsed = Config::parse(Path::new("agent.toml"), &format!("{GOOD}[engine]\n{line}\n"));
        parsed.map(|config| config.engine_threads).map_err(|error| error.to_string())
    };
    assert!(threads("").is_ok_and(|usual| (1..=4).contains(&usual)));
    assert_eq!(threads("threads = 1"), Ok(1));
    assert_eq!(threads("threads = 64"), Ok(64));
    for wrong in [0, 65] {
        let said = format!("agent.toml: `threads` of [engine] is {wrong}; 1 to 64");
        assert_eq!(threads(&format!("threads = {wrong}")), Err(said));
    }
    assert!(threads("threads = -1").is_err_and(|said| said.contains("line 6")));
    assert!(threads("thread = 2").is_err_and(|said| said.contains("line 6")));
}

#[test]
fn links_are_authenticated_unless_the_operator_chooses() {
    let links = |text: &str| {
        let parsed = Config::parse(Path::new("agent.toml"), &format!("{GOOD}{text}"));
        parsed.map(|config| config.links.protection).map_err(|error| error.to_string())
    };
    assert_eq!(links(""), Ok(LinkProtection::Authenticated));
    assert_eq!(links("[links]\n"), Ok(LinkProtection::Authenticated));
    for protection in [LinkProtection::None, LinkProtection::Authenticated, LinkProtection::Encrypted] {
        assert_eq!(links(&format!("[links]\nprotection = \"{protection}\"\n")), Ok(protection));
    }
    let unknown = links("[links]\nprotection = \"plain\"\n").unwrap_err();
    assert!(unknown.contains("line 6") && unknown.contains("plain"), "{unknown}");
    assert!(links("[links]\nencrypted = true\n").is_err_and(|said| said.contains("line 6")));
}

#[test]
fn packets_are_marked_by_class_where_the_operator_says() {
    let dscp = |text: &str| {
        let parsed = Config::parse(Path::new("agent.toml"), &format!("{GOOD}[links]\n{text}"));
        parsed.map(|config| config.links.dscp).map_err(|error| error.to_string())
    };
    assert_eq!(dscp(""), Ok(None));
    assert_eq!(dscp("dscp = { latency = 46, bulk = 8 }\n"), Ok(Some(Dscp([46, 0, 8]))));
    for (wrong, said) in [("latency = 64", "0 to 63"), ("large = 8", "large"), ("bulk = -1", "-1")] {
        let error = dscp(&format!("dscp = {{ {wrong} }}\n")).unwrap_err();
        assert!(error.contains("line 6") && error.contains(said), "{error}");
    }
}

#[test]
fn errors_name_file_line_and_key() {
    let unknown = error(&format!("{GOOD}spinn = \"20us\"\n"));
    assert!(unknown.starts_with("agent.toml: line 5") && unknown.contains("spinn"), "{unknown}");
    let bad = error(&format!("{GOOD}spin = \"20\"\n"));
    assert!(bad.contains("line 5") && bad.contains("20"), "{bad}");
    let missing = error("host = \"h0\"\n");
    assert!(missing.contains("control"), "{missing}");
    let anywhere = value(&GOOD.replace("127.0.0.1:0", "0.0.0.0:7100"));
    assert!(matches!(anywhere, ValueError::AgentListensAnywhere(_)), "{anywhere}");
    let nobody = format!("{GOOD}[[tenant]]\nname = \"a\"\nsocket = \"/a\"\nuids = []\n");
    let nobody = value(&nobody);
    assert!(matches!(nobody, ValueError::Tenant { error: TenantError::NoUids, .. }), "{nobody}");
}

#[test]
fn values_that_make_no_sense_are_refused() {
    for (line, expected) in [
        ("peer_timeout = \"0s\"", "`peer_timeout` is 0ns; it must be at least 1s"),
        ("peer_timeout = \"999ms\"", "`peer_timeout` is 999ms; it must be at least 1s"),
        ("connect_timeout = \"0s\"", "`connect_timeout` must be longer than nothing"),
    ] {
        assert_eq!(error(&format!("{GOOD}{line}\n")), format!("agent.toml: {expected}"));
    }
    for control in
        ["10.0.0.1", "10.0.0.1:", ":7000", "10.0.0.1:0", "http://h0:7000", "https://h0:7000", "a b:1"]
    {
        let said = error(&GOOD.replace("127.0.0.1:7000", control));
        assert_eq!(
            said,
            format!("agent.toml: `control` is `{control}`; give address and port, such as \"10.0.0.1:7000\"")
        );
    }
    for control in ["c0:7000", "[fd00::1]:7000"] {
        let text = GOOD.replace("127.0.0.1:7000", control);
        let secured = text.replace("insecure_loopback = true", "tls = \"tls\"");
        let config = Config::parse(Path::new("/etc/agent.toml"), &secured).unwrap();
        assert_eq!(
            (config.control, config.protection),
            (vec![control.to_owned()], Protection::Mutual(Folder("/etc/tls".into())))
        );
        let error = value(&text);
        assert!(matches!(error, ValueError::Protection(ProtectionError::NotLoopback { .. })), "{error}");
        let error = value(&text.replace("insecure_loopback = true\n", ""));
        assert!(matches!(error, ValueError::Protection(ProtectionError::Neither)), "{error}");
    }
    let several = GOOD.replace("\"127.0.0.1:7000\"", "[\"127.0.0.1:7000\", \"[::1]:7001\"]");
    let config = Config::parse(Path::new("agent.toml"), &several).unwrap();
    assert_eq!(config.control, ["127.0.0.1:7000", "[::1]:7001"]);
    let loopback = value(&several.replace("[::1]:7001", "10.0.0.1:7001"));
    assert!(matches!(loopback, ValueError::Protection(ProtectionError::NotLoopback { .. })), "{loopback}");
    let none = value(&GOOD.replace("\"127.0.0.1:7000\"", "[]"));
    assert!(matches!(none, ValueError::NoControl), "{none}");
    for unusable in ["", "a/b", "a b", &"a".repeat(64)] {
        let error = value(&format!("{GOOD}{}", SOCKET.replace("\"a\"", &format!("{unusable:?}"))));
        let ValueError::Tenant { name, error: TenantError::Name } = &error else { panic!("{error}") };
        assert_eq!(name, unusable);
    }
    let added = "[control_tenants]\nsockets = \"/t\"\n";
    for (table, named) in [(SOCKET, "tenant `a`"), (added, "[control_tenants]")] {
        let said = error(&format!("{GOOD}{table}operation_timeout = \"0s\"\n"));
        assert_eq!(
            said,
            format!("agent.toml: {named}: `operation_timeout` is 0, no operation could end well")
        );
        for nobodys in ["attachments", "communicators"] {
            let error = value(&format!("{GOOD}{table}{nobodys} = 0\n"));
            let (ValueError::Tenant { error: TenantError::Quota(quota), .. }
            | ValueError::ControlTenantsQuota(quota)) = &error
            else {
                panic!("{error}")
            };
            assert!(matches!(quota, QuotaError::Nobody { key, .. } if *key == nobodys), "{error}");
        }
    }
    for (line, least) in [
        ("operations = 0", 1),
        ("descriptors = 9", 10),
        ("attaches = 0", 1),
        ("joins = 0", 1),
        ("log_lines = 0", 1),
        ("session_percent = 0", 1),
    ] {
        let (key, value) = line.split_once(" = ").unwrap();
        let why = format!("`{key}` is {value}; it must be at least {least}");
        assert_eq!(error(&format!("{GOOD}{SOCKET}{line}\n")), format!("agent.toml: tenant `a`: {why}"));
        assert_eq!(error(&format!("{GOOD}{added}{line}\n")), format!("agent.toml: [control_tenants]: {why}"));
    }
    let error = value(&format!("{GOOD}{SOCKET}session_percent = 101\n"));
    let ValueError::Tenant { error: TenantError::Quota(error), .. } = error else { panic!("{error}") };
    assert_eq!(error, QuotaError::SessionPercent(101));
}

const SOCKET: &str = "[[tenant]]\nname = \"a\"\nsocket = \"/a\"\nuids = [0]\n";

#[test]
fn the_tables_on_rdma_keep_to_the_same() {
    for table in ["verbs", "rdma"] {
        let error = |line: &str| error(&format!("{GOOD}[{table}]\n{line}\n"));
        for (line, key) in [("retries = 7", "retries"), ("timeout = 32", "timeout"), ("mtu = 1500", "mtu")] {
            let said = error(line);
            let expected = format!("agent.toml: `{key}` of [{table}] is ");
            assert!(said.starts_with(&expected), "{said}");
        }
        assert!(error("mtuu = 4096").contains("line 6"), "{}", error("mtuu = 4096"));
    }
    let unknown = error(&format!("{GOOD}[rdma]\nlisten = \"h0:7300\"\n"));
    assert!(unknown.contains("line 6"), "{unknown}");
}

#[test]
fn tenants_come_in_as_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.toml");
    write(&folder.path().join("a.secret"), "0123456789abcdef0123456789abcdef\n", 0o600);
    let distant = "rdma = true\nsecret = \"a.secret\"\naddresses = [\"192.168.7.2\", \"::ffff:10.0.0.1\"]\n";
    let text = format!(
        "{GOOD}[rdma]\ndevice = \"mlx5_0:1\"\ntimeout = 14\nlisten = \"192.168.7.1:7300\"\n{SOCKET}{distant}\
         [[tenant]]\nname = \"b\"\n{distant}[[tenant]]\nname = \"c\"\nsocket = \"/c\"\nuids = [5]\n"
    );
    let config = Config::parse(&path, &text).unwrap();
    let rdma = config.rdma.unwrap();
    assert_eq!(rdma.listen, Some("192.168.7.1:7300".parse().unwrap()));
    let wanted = rdma.port_options();
    assert_eq!((wanted.device.as_deref(), wanted.timeout, wanted.retries), (Some("mlx5_0:1"), 14, 6));
    let [a, b, c] = config.tenants.try_into().unwrap();
    assert_eq!(a.addresses, ["192.168.7.2", "10.0.0.1"].map(|ip| ip.parse::<std::net::IpAddr>().unwrap()));
    assert_eq!(a.secret, harmonaize_abi::session::Secret::new(b"0123456789abcdef0123456789abcdef"));
    assert!(a.socket.is_some() && a.rdma);
    assert!(b.socket.is_none() && b.secret.is_some());
    assert!(c.socket.is_some() && c.secret.is_none() && c.addresses.is_empty() && !c.rdma);
    // Devices that this host has not, for processes on it.
    let text = format!("{GOOD}[rdma]\n{SOCKET}rdma = true\naddresses = [\"10.0.0.2\"]\n");
    let [d] = Config::parse(&path, &text).unwrap().tenants.try_into().unwrap();
    assert!(d.secret.is_none() && d.addresses.len() == 1);
}

#[test]
fn a_tenant_has_the_budgets_that_the_file_says() {
    let lines = "operations = 512\ndescriptors = 100\nlanding = \"1GiB\"\nattaches = 2\njoins = 3\nlog_lines = 4\n\
                 session_percent = 5\n";
    let usual = Quota::default();
    let budgets = |quota: Quota| {
        let Quota { operations, descriptors, attaches, joins, log_lines, .. } = quota;
        ([operations, descriptors, attaches, joins, log_lines, quota.session_percent], quota.landing_bytes)
    };
    let added = "[control_tenants]\nsockets = \"/t\"\n";
    for (lines, expected) in [("", budgets(usual)), (lines, ([512, 100, 2, 3, 4, 5], 1 << 30))] {
        let text = format!("{GOOD}{SOCKET}{lines}{added}{lines}");
        let config = Config::parse(Path::new("agent.toml"), &text).unwrap();
        assert_eq!(budgets(config.tenants[0].quota), expected);
        assert_eq!(budgets(config.control_tenants.unwrap().quota), expected);
    }
}

#[test]
fn tenants_that_nobody_could_be_are_refused() {
    type Is = fn(&TenantError) -> bool;
    let rdma = "[rdma]\nlisten = \"127.0.0.1:7300\"\n";
    let text = |rdma: &str, lines: &str| format!("{GOOD}{rdma}[[tenant]]\nname = \"a\"\n{lines}\n");
    let socket = "socket = \"/a\"\nuids = [0]";
    let all = "rdma = true\nsecret = \"a.secret\"\naddresses = [\"10.0.0.2\"]";
    let cases: [(&str, &str, Is); 7] = [
        ("", "", |error| matches!(error, TenantError::NowhereToAttach)),
        ("", "uids = [1]", |error| matches!(error, TenantError::UidsWithoutSocket)),
        ("", &format!("{socket}\nrdma = true"), |error| matches!(error, TenantError::NoRdma)),
        ("[rdma]\n", all, |error| matches!(error, TenantError::AddressesWithoutListen)),
        (rdma, &all.replace("rdma = true\n", ""), |error| matches!(error, TenantError::AddressesWithoutRdma)),
        (rdma, "rdma = true\nsecret = \"a.secret\"", |error| {
            matches!(error, TenantError::SecretWithoutAddresses)
        }),
        (rdma, "rdma = true\naddresses = [\"10.0.0.2\"]", |error| {
            matches!(error, TenantError::AddressesWithoutSecret)
        }),
    ];
    for (rdma, lines, expected) in cases {
        let error = value(&text(rdma, lines));
        assert!(
            matches!(&error, ValueError::Tenant { name, error } if name == "a" && expected(error)),
            "{error}"
        );
    }
    let said = error(&text(rdma, "rdma = true\naddresses = [\"h0\"]"));
    assert!(said.starts_with("agent.toml: line 10, column 14"), "{said}");
    let twice = value(&format!("{GOOD}{SOCKET}{}", SOCKET.replace("\"a\"", "\"b\"")));
    assert!(
        matches!(&twice, ValueError::Tenant { name, error: TenantError::Twice } if name == "b"),
        "{twice}"
    );
}

#[test]
fn secrets_are_files_of_their_owner_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.secret");
    let text = format!(
        "{GOOD}[rdma]\nlisten = \"127.0.0.1:7300\"\n[[tenant]]\nname = \"a\"\nrdma = true\nsecret = {file:?}\n\
         addresses = [\"10.0.0.2\"]\n"
    );
    let refused = || match value(&text) {
        ValueError::Tenant { name, error: TenantError::Secret { path, error } } => {
            assert_eq!((name.as_str(), &path), ("a", &file));
            error
        }
        other => panic!("{other}"),
    };
    let missing = error(&text);
    let prefix = format!("agent.toml: tenant `a`: `secret`, {}: No such file", file.display());
    assert!(missing.starts_with(&prefix), "{missing}");
    assert!(matches!(refused(), SecretError::Read(error) if error.kind() == ErrorKind::NotFound));
    for mode in [0o640, 0o604, 0o620, 0o601] {
        write(&file, &"x".repeat(40), mode);
        assert!(matches!(refused(), SecretError::Mode(found) if found == mode), "{mode:03o}");
    }
    write(&file, &"x".repeat(31), 0o400);
    assert!(matches!(refused(), SecretError::TooShort));
    write(&file, &"x".repeat(70_000), 0o600);
    assert!(matches!(refused(), SecretError::TooLong));
    std::fs::remove_file(&file).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(matches!(refused(), SecretError::NoFile));
    std::fs::remove_file(&file).unwrap();
    write(&file, &"x".repeat(32), 0o600);
    Config::parse(Path::new("agent.toml"), &text).unwrap();
}

fn write(path: &Path, text: &str, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    let _ = std::fs::remove_file(path);
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_table_asks_for_telemetry() {
    let parse = |text: &str| Config::parse(Path::new("agent.toml"), &format!("{GOOD}{text}"));
    assert_eq!(parse("").unwrap().telemetry, None);
    assert_eq!(parse("[telemetry]\n").unwrap().telemetry, Some(Telemetry::default()));
    let full = "[telemetry]\ninterfaces = [\"eth0\", \"eth1\"]\nsocket = \"/run/t.sock\"\nuids = [7]\n\
        idle_gap = \"1ms\"\nlate_round_trip = \"0ns\"\nflows = 1000\ninterval = \"2ms\"\n\
        rate = { eth1 = \"25Gbit/s\" }\nrecord = \"x.trace\"\nrecord_limit = \"9MiB\"\nrun_time = true\nkernel = false\n\
        diagnosis = true\nxdp = true\n";
    let wanted = Telemetry {
        interfaces: vec!["eth0".into(), "eth1".into()],
        socket: Some("/run/t.sock".into()),
        uids: vec![7],
        idle_gap: Duration::from_millis(1),
        late_rtt: Some(Duration::ZERO),
        flows: 1000,
        interval: Duration::from_millis(2),
        rates: [("eth1".to_owned(), 25_000_000_000)].into(),
        record: Some("x.trace".into()),
        record_bytes: 9 << 20,
        run_time: true,
        kernel: false,
        diagnosis: true,
        xdp: true,
    };
    assert_eq!(parse(full).unwrap().telemetry, Some(wanted));
    let time = |key, value, least, most| TelemetryError::Time {
        key,
        value: Nanos(value),
        least: Nanos(least),
        most: Nanos(most),
    };
    for (line, expected) in [
        ("interfaces = [\"a/b\"]", TelemetryError::InterfaceName("a/b".into())),
        ("interfaces = [\"\"]", TelemetryError::InterfaceName(String::new())),
        ("interfaces = [\"more-than-fifteen\"]", TelemetryError::InterfaceName("more-than-fifteen".into())),
        ("interfaces = [\"eth0\", \"eth0\"]", TelemetryError::InterfaceTwice("eth0".into())),
        ("rate = { eth0 = \"0Gbit/s\" }", TelemetryError::NoRate("eth0".into())),
        (
            "interfaces = [\"eth0\"]\nrate = { eth1 = \"1Gbit/s\" }",
            TelemetryError::RateOfOther("eth1".into()),
        ),
        ("uids = [1]", TelemetryError::UidsWithoutSocket),
        ("record_limit = \"5KiB\"", TelemetryError::RecordLimit(5120)),
        ("flows = 3", TelemetryError::Flows { flows: 3 }),
        ("interval = \"1us\"", time("interval", 1_000, 1_000_000, 10_000_000_000)),
        ("idle_gap = \"0ns\"", time("idle_gap", 0, 1_000, 10_000_000_000)),
        ("late_round_trip = \"31ms\"", time("late_round_trip", 31_000_000, 0, 30_000_000)),
    ] {
        let error = value(&format!("{GOOD}[telemetry]\n{line}\n"));
        assert!(matches!(&error, ValueError::Telemetry(error) if *error == expected), "{line}: {error}");
    }
    let said = error(&format!("{GOOD}[telemetry]\ninterval = \"1us\"\n"));
    assert_eq!(said, "agent.toml: `interval` of [telemetry] is 1us; 1ms to 10s");
    for line in ["metric = \"127.0.0.1:1\"", "interval = 5"] {
        let said = error(&format!("{GOOD}[telemetry]\n{line}\n"));
        assert!(said.starts_with("agent.toml: line 6"), "{line}: {said}");
    }
}
