//! What a configuration says, and what is wrong with it.

use super::*;

const GOOD: &str = "host = \"h0\"\ncontrol = \"127.0.0.1:7000\"\nlisten = \"127.0.0.1:0\"\n";

fn error(text: &str) -> String {
    Config::parse(Path::new("agent.toml"), text).unwrap_err().to_string()
}

#[test]
fn defaults_and_units() {
    let tenant = "[[tenant]]\nname = \"a\"\nsocket = \"/run/a.sock\"\nuids = [1000]\narena = \"256MiB\"\n";
    let text = format!("{GOOD}spin = \"20us\"\n{tenant}");
    let config = Config::parse(Path::new("agent.toml"), &text).unwrap();
    assert_eq!(config.spin, Duration::from_micros(20));
    assert_eq!(config.peer_timeout, Duration::from_secs(5));
    assert_eq!(config.tenants[0].quota.arena_bytes, 256 << 20);
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
    assert!(parse("[verbs]\nretries = 7\n").unwrap_err().to_string().contains("at most 6"));
    assert!(parse("[verbs]\ntimeout = 0\n").unwrap_err().to_string().contains("1 to 31"));
    assert!(parse("[verbs]\ngid = 7\n").unwrap_err().to_string().contains("line 5"));
}

#[test]
fn errors_name_file_line_and_key() {
    let unknown = error(&format!("{GOOD}spinn = \"20us\"\n"));
    assert!(unknown.starts_with("agent.toml: line 4") && unknown.contains("spinn"), "{unknown}");
    let bad = error(&format!("{GOOD}spin = \"20\"\n"));
    assert!(bad.contains("line 4") && bad.contains("20"), "{bad}");
    let missing = error("host = \"h0\"\n");
    assert!(missing.contains("control"), "{missing}");
    let anywhere = error(&GOOD.replace("127.0.0.1:0", "0.0.0.0:7100"));
    assert!(anywhere.contains("listen"), "{anywhere}");
    let nobody = format!("{GOOD}[[tenant]]\nname = \"a\"\nsocket = \"/a\"\nuids = []\n");
    assert!(error(&nobody).contains("uids"), "{}", error(&nobody));
}
