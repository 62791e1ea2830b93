//! Who gets a connection with control, and as whom.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests alone

use harmonaize_identity::{
    Authority, CONTROL, Connection, Folder, Identity, Peer, Protection, Remote, Use, root_cause, serve,
};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

const LIMIT: Duration = Duration::from_secs(20);

fn issued(authority: &Authority, name: &str, purpose: Use, folder: &Path) -> Protection {
    let folder = Folder(folder.join(name));
    authority.issue(name, purpose).unwrap().write(&folder).unwrap();
    Protection::Mutual(folder)
}

async fn listen(protection: &Protection) -> (SocketAddr, ReceiverStream<std::io::Result<Connection>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    (listener.local_addr().unwrap(), serve(listener, protection, 4).unwrap())
}

/// Who the server says is there; none where it was refused.
async fn seen(
    client: &Protection,
    address: SocketAddr,
    incoming: &mut ReceiverStream<std::io::Result<Connection>>,
) -> Option<Peer> {
    let server = Remote::at(client, CONTROL, &address.to_string()).unwrap();
    let client = tokio::spawn(async move { server.connect().await.map(drop) });
    let peer = tokio::select! {
        connection = incoming.next() => Some(connection.unwrap().unwrap().connect_info()),
        () = tokio::time::sleep(Duration::from_secs(1)) => None,
    };
    client.abort();
    peer
}

#[tokio::test]
async fn only_the_authoritys_certificates_connect_and_each_as_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    let (authority, stranger) = (Authority::create().unwrap(), Authority::create().unwrap());
    let control = issued(&authority, CONTROL, Use::Control, &ours);
    let (address, mut incoming) = listen(&control).await;
    let host = issued(&authority, "h0", Use::Session, &ours);
    let peer = seen(&host, address, &mut incoming).await.expect("an agent of ours");
    assert!(peer.identity.may_be_host("h0") && !peer.identity.may_be_host("h1"), "{}", peer.identity);
    // Another authority's, with our authority as what it trusts; and a certificate that is control's own.
    let strange = issued(&stranger, "h0", Use::Session, &theirs);
    std::fs::copy(ours.join("h0/ca.crt"), theirs.join("h0/ca.crt")).unwrap();
    assert!(seen(&strange, address, &mut incoming).await.is_none(), "a stranger");
    assert!(seen(&control, address, &mut incoming).await.is_none(), "no certificate for this");
    // Nothing at all.
    let mut bare = TcpStream::connect(address).await.unwrap();
    bare.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut rest = Vec::new();
    tokio::time::timeout(LIMIT, bare.read_to_end(&mut rest)).await.unwrap().ok();
    let next = tokio::time::timeout(Duration::from_millis(200), incoming.next()).await;
    assert!(next.is_err(), "nobody without a certificate");
}

#[tokio::test]
async fn nobody_is_control_by_another_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let (authority, stranger) = (Authority::create().unwrap(), Authority::create().unwrap());
    let host = issued(&authority, "h0", Use::Session, folder.path());
    let other = folder.path().join("other");
    for (what, protection) in [
        ("an agent named control", issued(&authority, CONTROL, Use::Session, &other.join("agent"))),
        ("another server of the authority", issued(&authority, "web", Use::Control, &other)),
        ("another authority's control", issued(&stranger, CONTROL, Use::Control, &other)),
    ] {
        let (address, _incoming) = listen(&protection).await;
        let server = Remote::at(&host, CONTROL, &address.to_string()).unwrap();
        let connected = tokio::time::timeout(LIMIT, server.connect()).await.unwrap();
        assert!(connected.is_err(), "{what}");
    }
}

#[tokio::test]
async fn new_certificates_count_from_the_next_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (Authority::create().unwrap(), Authority::create().unwrap());
    let control = issued(&old, CONTROL, Use::Control, folder.path());
    let (address, mut incoming) = listen(&control).await;
    let host = issued(&old, "h0", Use::Session, folder.path());
    let before = seen(&host, address, &mut incoming).await.expect("before").serial;
    let host = issued(&old, "h0", Use::Session, folder.path());
    let renewed = seen(&host, address, &mut incoming).await.expect("another of the same").serial;
    assert!(!before.is_empty() && renewed != before, "{before} {renewed}");
    // A broken file changes nothing.
    std::fs::write(folder.path().join("control/tls.crt"), "nothing").unwrap();
    assert!(seen(&host, address, &mut incoming).await.is_some(), "by those before");
    issued(&new, CONTROL, Use::Control, folder.path());
    assert!(seen(&host, address, &mut incoming).await.is_none(), "the old authority is not trusted");
    let host = issued(&new, "h0", Use::Session, folder.path());
    assert!(seen(&host, address, &mut incoming).await.is_some(), "after");
}

#[tokio::test]
async fn an_authoritys_list_is_not_anothers() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| Folder(folder.path().join(name));
    Authority::create().unwrap().save(&at("old").0).unwrap();
    let (old, new) = (Authority::open(&at("old").0).unwrap(), Authority::create().unwrap());
    let control = issued(&old, CONTROL, Use::Control, folder.path());
    let [alice, bob] = ["alice", "bob"].map(|name| issued(&old, name, Use::Session, folder.path()));
    let carol = issued(&new, "carol", Use::Session, folder.path());
    let both: String =
        ["bob", "carol"].map(|name| std::fs::read_to_string(at(name).authorities()).unwrap()).concat();
    for name in [CONTROL, "alice", "bob", "carol"] {
        std::fs::write(at(name).authorities(), &both).unwrap();
    }
    old.revoke(&at(CONTROL).revoked(), &[at("alice").certificate()]).unwrap();
    let (address, mut incoming) = listen(&control).await;
    assert!(seen(&alice, address, &mut incoming).await.is_none(), "revoked");
    assert!(seen(&bob, address, &mut incoming).await.is_some(), "by the authority that has a list");
    assert!(seen(&carol, address, &mut incoming).await.is_some(), "by the other one");
}

#[tokio::test]
async fn a_revoked_certificate_connects_no_more_and_its_connections_end() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create().unwrap();
    let control = issued(&authority, CONTROL, Use::Control, folder.path());
    let (address, mut incoming) = listen(&control).await;
    let [alice, bob] = ["alice", "bob"].map(|name| issued(&authority, name, Use::Session, folder.path()));
    let mut connections = Vec::new();
    for who in [&alice, &bob] {
        let server = Remote::at(who, CONTROL, &address.to_string()).unwrap();
        let client = tokio::spawn(async move { server.connect().await });
        connections.push((incoming.next().await.unwrap().unwrap(), client));
    }
    let list = folder.path().join("control/ca.crl");
    let certificate = |name: &str| folder.path().join(name).join("tls.crt");
    assert_eq!(authority.revoke(&list, &[certificate("alice")]).unwrap(), 1);
    let mut bytes = Vec::new();
    let (ended, rest) = connections.split_first_mut().unwrap();
    let error = loop {
        // What HTTP/2 says first comes before the end.
        let mut part = [0; 1024];
        match tokio::time::timeout(LIMIT, ended.0.read(&mut part)).await.unwrap() {
            Ok(0) => panic!("closed by the client"),
            Ok(count) => bytes.extend_from_slice(&part[..count]),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionAborted, "{error}");
    assert!(seen(&alice, address, &mut incoming).await.is_none(), "revoked");
    assert!(seen(&bob, address, &mut incoming).await.is_some(), "another's is good");
    let mut part = [0; 1024];
    let other = tokio::time::timeout(Duration::from_millis(1500), async {
        while rest[0].0.read(&mut part).await.unwrap() > 0 {}
    });
    assert!(other.await.is_err(), "and his connection goes on");
    // Once more, and another: those before stay on the list.
    assert_eq!(authority.revoke(&list, &[certificate("alice"), certificate("bob")]).unwrap(), 2);
    assert!(seen(&bob, address, &mut incoming).await.is_none());
    issued(&Authority::create().unwrap(), "carol", Use::Session, folder.path());
    let error = authority.revoke(&list, &[certificate("control"), certificate("carol")]).unwrap_err();
    assert!(error.to_string().contains("carol/tls.crt: "), "another authority's: {error}");
    assert_eq!(authority.revoke(&list, &[]).unwrap(), 2, "nothing has changed");
}

#[tokio::test]
async fn a_revoked_certificate_of_control_is_nobodys() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create().unwrap();
    let control = issued(&authority, CONTROL, Use::Control, folder.path());
    let (address, _incoming) = listen(&control).await;
    let host = issued(&authority, "h0", Use::Session, folder.path());
    let connected = async || {
        let server = Remote::at(&host, CONTROL, &address.to_string()).unwrap();
        tokio::time::timeout(LIMIT, server.connect()).await.unwrap()
    };
    assert!(connected().await.is_ok(), "before");
    let list = folder.path().join("h0/ca.crl");
    authority.revoke(&list, &[folder.path().join("control/tls.crt")]).unwrap();
    let error = connected().await.unwrap_err();
    assert!(root_cause(&error).contains("Revoked"), "{error:?}");
    std::fs::write(list, "no list").unwrap();
    let error = Remote::at(&host, CONTROL, &address.to_string()).unwrap_err();
    assert!(error.to_string().contains("ca.crl"), "{error}");
}

#[tokio::test]
async fn a_reopened_authority_signs_for_the_same() {
    let folder = tempfile::tempdir().unwrap();
    Authority::create().unwrap().save(folder.path()).unwrap();
    let open = || Authority::open(folder.path()).unwrap();
    let control = issued(&open(), CONTROL, Use::Control, folder.path());
    let host = issued(&open(), "h0", Use::Session, folder.path());
    let (address, mut incoming) = listen(&control).await;
    assert!(seen(&host, address, &mut incoming).await.is_some());
    // Also where another one is trusted beside it.
    let own = std::fs::read_to_string(folder.path().join("ca.crt")).unwrap();
    Authority::create().unwrap().save(&folder.path().join("other")).unwrap();
    let other = std::fs::read_to_string(folder.path().join("other/ca.crt")).unwrap();
    std::fs::write(folder.path().join("ca.crt"), other.clone() + &own).unwrap();
    let host = issued(&open(), "h0", Use::Session, folder.path());
    assert!(seen(&host, address, &mut incoming).await.is_some());
    std::fs::write(folder.path().join("ca.crt"), other).unwrap();
    assert!(Authority::open(folder.path()).unwrap_err().to_string().contains("no certificate is of ca.key"));
    std::fs::write(folder.path().join("ca.key"), "no key").unwrap();
    assert!(Authority::open(folder.path()).unwrap_err().to_string().contains("ca.key"));
}

#[tokio::test]
async fn who_has_no_certificate_is_anyone_on_the_loopback() {
    let (address, mut incoming) = listen(&Protection::InsecureLoopback).await;
    let peer = seen(&Protection::InsecureLoopback, address, &mut incoming).await.unwrap();
    assert_eq!(peer.identity, Identity::Local);
}

#[test]
fn missing_and_broken_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = Protection::Mutual(Folder(folder.path().join("none")));
    assert!(
        Remote::at(&nowhere, CONTROL, "10.0.0.1:7000")
            .unwrap_err()
            .to_string()
            .contains("ca.crt: No such file")
    );
    let authority = Authority::create().unwrap();
    for name in ["ä", "", "..", "a/b", "a b", ".h0", &"h".repeat(64)] {
        assert!(authority.issue(name, Use::Session).is_err(), "{name}");
    }
}

#[tokio::test]
async fn strangers_that_say_nothing_keep_nobody_out() {
    harmonaize_identity::raise_open_files();
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create().unwrap();
    let (address, mut incoming) = listen(&issued(&authority, CONTROL, Use::Control, folder.path())).await;
    let host = issued(&authority, "h0", Use::Session, folder.path());
    // From the host's own address, and more than a process may usually have open.
    let mut idle = Vec::new();
    for _ in 0..1100 {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    let begin = tokio::time::Instant::now();
    while seen(&host, address, &mut incoming).await.is_none() {
        assert!(begin.elapsed() < Duration::from_secs(4), "kept out until the strangers' time was over");
    }
    drop(idle);
}

#[tokio::test]
async fn an_identity_has_so_many_connections_and_hears_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create().unwrap();
    let (address, mut incoming) = listen(&issued(&authority, CONTROL, Use::Control, folder.path())).await;
    let clients = ["h0", "h1"].map(|name| issued(&authority, name, Use::Session, folder.path()));
    let mut held = Vec::new();
    let mut connect = async |client: &Protection| {
        let server = Remote::at(client, CONTROL, &address.to_string()).unwrap();
        let client = tokio::spawn(async move { server.connect().await });
        let connection = tokio::time::timeout(Duration::from_secs(1), incoming.next()).await.ok()?;
        let connection = connection.unwrap().unwrap();
        let surplus = connection.connect_info().surplus_of;
        held.push((connection, client));
        Some(surplus)
    };
    for number in 0..8 {
        assert_eq!(connect(&clients[0]).await, Some((number >= 4).then_some(4)), "{number}");
    }
    assert_eq!(connect(&clients[0]).await, None, "closed");
    assert_eq!(connect(&clients[1]).await, Some(None), "another has its own");
}
