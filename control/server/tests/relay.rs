//! Questions of operators that agents answer with rows, over loopback, with agents that are played by the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::{
    AnswerPart, AskReply, AskRequest, Flow, HostEnd, Question, RowFilter, RowKind, TracePart, to_agent,
};
use harmonaize_planner::Topology;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::agents::{Agent, hello_of};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

/// Control of so many hosts, which runs as long as the test.
async fn start(hosts: usize) -> String {
    let mut topology = "[[switch]]\nname = \"s\"\n".to_owned();
    for host in 0..hosts {
        topology += &format!("[[host]]\nname = \"h{host}\"\n");
        topology += &format!("[[link]]\nfrom = \"h{host}\"\nto = \"s\"\nrate = \"1Gbit/s\"\n");
    }
    let text = "listen = \"127.0.0.1:0\"\ntopology = \"\"\ninsecure_loopback = true\nsession_timeout = \"10s\"\n\
                tenant = [{ name = \"a\" }]\n";
    let config = Config::parse(text, Topology::parse(&topology).unwrap()).unwrap();
    let server = Server::bind(config).await.unwrap();
    let address = server.local_address();
    tokio::spawn(server.run(std::future::pending()));
    format!("http://{address}")
}

async fn channel(control: &str) -> Channel {
    Endpoint::from_shared(control.to_owned()).unwrap().connect().await.unwrap()
}

/// An agent that has a session.
struct Played {
    agent: Agent,
    host: String,
}

async fn play(control: &str, host: &str) -> Played {
    let (agent, _) = Agent::hello(channel(control).await, hello_of(host)).await.unwrap();
    Played { agent, host: host.to_owned() }
}

impl Played {
    async fn question(&mut self) -> Question {
        match self.agent.next().await.unwrap() {
            to_agent::Message::Question(question) => question,
            other => panic!("no question but {other:?}"),
        }
    }

    /// A part with flows of these ports.
    fn part(&self, question: &Question, ports: std::ops::Range<u32>) -> AnswerPart {
        let flows = ports.map(|port| Flow { remote_port: port, ..Flow::default() }).collect();
        AnswerPart { id: question.id, host: self.host.clone(), time_ns: 7, flows, ..AnswerPart::default() }
    }

    /// Opens an answer, whose end is what control says of it.
    fn answer(&self) -> (mpsc::Sender<AnswerPart>, tokio::task::JoinHandle<Result<(), Status>>) {
        let (parts, call) = self.agent.answer();
        (parts, tokio::spawn(call))
    }
}

async fn ask(control: &str, request: AskRequest) -> Result<Streaming<AskReply>, Status> {
    OperatorClient::new(channel(control).await).ask(request).await.map(tonic::Response::into_inner)
}

fn flows() -> AskRequest {
    AskRequest { kind: RowKind::Flow.into(), patience_ns: 60_000_000_000, ..AskRequest::default() }
}

/// The ports of each host's flows, and how its answer ended.
async fn all(mut replies: Streaming<AskReply>) -> BTreeMap<String, (Vec<u32>, Option<HostEnd>)> {
    let mut hosts: BTreeMap<String, (Vec<u32>, Option<HostEnd>)> = BTreeMap::new();
    while let Some(reply) = replies.message().await.unwrap() {
        let (ports, end) = hosts.entry(reply.host).or_default();
        ports.extend(reply.flows.iter().map(|flow| flow.remote_port));
        *end = reply.end.or(end.take());
    }
    hosts
}

fn failure(text: &str) -> Option<HostEnd> {
    Some(HostEnd { failure: text.to_owned(), omitted: 0 })
}

#[tokio::test]
async fn rows_come_of_all_hosts_and_silent_ones_are_named() {
    let control = start(4).await;
    let (mut first, mut second, mut third) =
        (play(&control, "h0").await, play(&control, "h1").await, play(&control, "h2").await);
    let filter = RowFilter { tenants: vec!["a".to_owned()], since_ns: 5, ..RowFilter::default() };
    let request = AskRequest { filter: Some(filter.clone()), last: 3, patience_ns: 2_000_000_000, ..flows() };
    let replies = ask(&control, request).await.unwrap();
    let question = first.question().await;
    // The filter and the number of rows are the agent's to heed.
    assert_eq!(question, Question { id: question.id, filter: Some(filter), last: 3, ..question.clone() });
    let (parts, done) = first.answer();
    parts.send(first.part(&question, 0..2)).await.unwrap();
    parts.send(AnswerPart { omitted: 9, ..first.part(&question, 2..3) }).await.unwrap();
    drop(parts);
    done.await.unwrap().unwrap();
    let question = second.question().await;
    let (parts, done) = second.answer();
    let refused = "no telemetry".to_owned();
    parts.send(AnswerPart { refused, ..second.part(&question, 0..0) }).await.unwrap();
    drop(parts);
    done.await.unwrap().unwrap();
    // This one is asked, and says nothing; the last has no session.
    let question = third.question().await;
    let hosts = all(replies).await;
    let of = |host: &str| hosts[host].clone();
    assert_eq!(of("h0"), (vec![0, 1, 2], Some(HostEnd { failure: String::new(), omitted: 9 })));
    assert_eq!(of("h1"), (vec![], failure("no telemetry")));
    assert_eq!(of("h2"), (vec![], failure("no end of its answer in time")));
    assert_eq!(of("h3"), (vec![], failure("its agent has no session with control")));
    // What comes too late is asked by nobody.
    let (parts, done) = third.answer();
    parts.send(third.part(&question, 0..1)).await.unwrap();
    assert_eq!(done.await.unwrap().unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_trace_comes_in_parts_and_ends() {
    let control = start(1).await;
    let mut agent = play(&control, "h0").await;
    let (kind, duration_ns) = (RowKind::Trace.into(), 7_000_000_000);
    // It ends by itself, whatever the reader says.
    let request = AskRequest { kind, duration_ns, follow: true, ..flows() };
    let mut replies = ask(&control, request).await.unwrap();
    let question = agent.question().await;
    assert_eq!((question.kind(), question.follow), (RowKind::Trace, false));
    assert_eq!(question.duration_ns, duration_ns);
    let (parts, done) = agent.answer();
    for byte in *b"ab" {
        let trace = Some(TracePart { bytes: vec![byte], realtime_offset_ns: 5 });
        parts.send(AnswerPart { trace, ..agent.part(&question, 0..0) }).await.unwrap();
    }
    drop(parts);
    done.await.unwrap().unwrap();
    let (mut bytes, mut end) = (Vec::new(), None);
    while let Some(reply) = replies.message().await.unwrap() {
        assert_eq!(reply.host, "h0");
        bytes.extend(reply.trace.into_iter().flat_map(|part| part.bytes));
        end = reply.end.or(end);
    }
    assert_eq!((bytes.as_slice(), end), (&b"ab"[..], Some(HostEnd::default())));
}

#[tokio::test]
async fn a_trace_that_broke_off_is_not_begun_again() {
    let control = start(2).await;
    let (mut first, mut second) = (play(&control, "h0").await, play(&control, "h1").await);
    let (kind, duration_ns) = (RowKind::Trace.into(), 5_000_000_000);
    let request = AskRequest { kind, duration_ns, patience_ns: duration_ns, ..flows() };
    let mut replies = ask(&control, request).await.unwrap();
    let question = first.question().await;
    let (parts, _) = first.answer();
    let trace = Some(TracePart { bytes: vec![1], realtime_offset_ns: 5 });
    parts.send(AnswerPart { trace, ..first.part(&question, 0..0) }).await.unwrap();
    assert!(replies.message().await.unwrap().unwrap().trace.is_some());
    drop((parts, first));
    let mut ended = vec![replies.message().await.unwrap().unwrap()];
    let _back = play(&control, "h0").await;
    // As the other host ends, control looks again whom to ask.
    let question = second.question().await;
    let (parts, done) = second.answer();
    parts.send(second.part(&question, 0..0)).await.unwrap();
    drop(parts);
    done.await.unwrap().unwrap();
    while let Some(reply) = replies.message().await.unwrap() {
        ended.push(reply);
    }
    assert!(ended.iter().all(|reply| reply.end.is_some()), "{ended:?}");
    assert_eq!(ended.iter().map(|reply| reply.host.as_str()).collect::<Vec<_>>(), ["h0", "h1"]);
}

#[tokio::test]
async fn an_agent_that_comes_back_is_asked_again_by_who_follows() {
    let control = start(1).await;
    let mut agent = play(&control, "h0").await;
    let mut replies = ask(&control, AskRequest { follow: true, ..flows() }).await.unwrap();
    let question = agent.question().await;
    let (parts, _) = agent.answer();
    parts.send(agent.part(&question, 0..1)).await.unwrap();
    assert_eq!(replies.message().await.unwrap().unwrap().flows.len(), 1);
    drop((parts, agent));
    let end = replies.message().await.unwrap().unwrap().end.unwrap();
    assert!(end.failure.is_empty() || end.failure.starts_with("its answer broke off"), "{end:?}");
    let mut agent = play(&control, "h0").await;
    let question = agent.question().await;
    let (parts, done) = agent.answer();
    parts.send(agent.part(&question, 1..2)).await.unwrap();
    assert_eq!(replies.message().await.unwrap().unwrap().flows[0].remote_port, 1);
    // The reader goes, and so does the agent's call.
    drop(replies);
    done.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_second_session_of_a_host_takes_no_questions() {
    let control = start(1).await;
    let mut agent = play(&control, "h0").await;
    let refused = Agent::hello(channel(&control).await, hello_of("h0")).await;
    assert!(refused.is_err(), "the host has a session");
    let replies = ask(&control, flows()).await.unwrap();
    let question = agent.question().await;
    let (parts, done) = agent.answer();
    parts.send(agent.part(&question, 0..1)).await.unwrap();
    drop(parts);
    done.await.unwrap().unwrap();
    assert_eq!(all(replies).await["h0"].0, [0]);
}

#[tokio::test]
async fn an_asked_host_may_answer_once() {
    let control = start(2).await;
    let (mut first, second) = (play(&control, "h0").await, play(&control, "h1").await);
    let request = AskRequest { hosts: vec!["h0".to_owned()], ..flows() };
    let mut replies = ask(&control, request).await.unwrap();
    let question = first.question().await;
    let (parts, done) = second.answer();
    parts.send(second.part(&question, 0..1)).await.unwrap();
    assert_eq!(done.await.unwrap().unwrap_err().code(), Code::NotFound);
    let (parts, done) = first.answer();
    parts.send(first.part(&question, 0..1)).await.unwrap();
    assert_eq!(replies.message().await.unwrap().unwrap().host, "h0");
    let (again, refused) = first.answer();
    again.send(first.part(&question, 0..1)).await.unwrap();
    assert_eq!(refused.await.unwrap().unwrap_err().code(), Code::NotFound);
    drop(parts);
    done.await.unwrap().unwrap();
    assert_eq!(all(replies).await.len(), 1);
    let unknown = ask(&control, AskRequest { hosts: vec!["h9".to_owned()], ..flows() }).await.unwrap_err();
    assert_eq!((unknown.code(), unknown.message()), (Code::NotFound, "the topology has no host `h9`"));
}

#[tokio::test]
async fn questions_and_parts_are_bounded() {
    let control = start(1).await;
    let mut agent = play(&control, "h0").await;
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(ask(&control, AskRequest { follow: true, ..flows() }).await.unwrap());
    }
    let full = ask(&control, flows()).await.unwrap_err();
    assert_eq!(full.code(), Code::ResourceExhausted, "{full:?}");
    let question = agent.question().await;
    let (parts, done) = agent.answer();
    let refused = "x".repeat(300 << 10);
    let large = AnswerPart { refused, ..agent.part(&question, 0..1) };
    parts.send(large).await.unwrap();
    let wrong = done.await.unwrap().unwrap_err();
    assert_eq!(wrong.code(), Code::InvalidArgument, "{wrong:?}");
}

/// A reader that reads nothing: it holds no more than a few parts, and is cut off with a text.
#[tokio::test]
async fn a_slow_reader_is_cut_off_with_a_text() {
    let control = start(1).await;
    let mut agent = play(&control, "h0").await;
    let mut replies = ask(&control, AskRequest { follow: true, ..flows() }).await.unwrap();
    let question = agent.question().await;
    let (parts, done) = agent.answer();
    let name = "x".repeat(20 << 10);
    let flow = Flow { interface: name, ..Flow::default() };
    let part = AnswerPart { flows: vec![flow], ..agent.part(&question, 0..0) };
    let mut sent = 0_usize;
    // Until the agent's call has ended, which the relay's patience with the reader bounds.
    while parts.send(part.clone()).await.is_ok() {
        sent += 1;
        assert!(sent < 10_000, "more than 200 MB wait");
    }
    let _ = done.await.unwrap();
    let cut = loop {
        match replies.message().await {
            Ok(Some(_)) => {}
            other => break other.unwrap_err(),
        }
    };
    assert_eq!(cut.code(), Code::ResourceExhausted);
    assert_eq!(cut.message(), "the reader took no row for 10 s, and is cut off");
    // Its place is free.
    for _ in 0..4 {
        let following = AskRequest { follow: true, ..flows() };
        let asked = tokio::time::timeout(Duration::from_secs(20), ask(&control, following));
        std::mem::forget(asked.await.unwrap().unwrap());
    }
}
