//! Control's page in headless Chromium, as an operator sees it before an emulated fabric: a job computes, a spine dies, and cross
//! traffic takes half of the other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use harmonaize_identity::{Folder, Protection, Remote};
use harmonaize_testkit::chromium::Chromium;
use harmonaize_testkit::cross_traffic::CrossTraffic;
use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_testkit::plans;
use harmonaize_testkit::strict;
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::load::under_load_of;
use harmonaize_tests::racks_with_unmanaged_hosts;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::mpsc::channel;
use std::time::Duration;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::transport::Channel;

/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(60);
const RATE: &str = "100Mbit/s";

/// Asks control for what the browser asks for.
async fn forward(mut control: Channel, request: Request) -> Response {
    let uri = format!("https://control{}", request.uri()).parse().unwrap();
    let mut asked = axum::http::Request::get("/").body(Body::empty()).unwrap();
    (*asked.uri_mut(), *asked.headers_mut()) = (uri, request.headers().clone());
    asked.headers_mut().remove("host");
    asked.headers_mut().remove("connection");
    let ready = std::future::poll_fn(|cx| GrpcService::<Body>::poll_ready(&mut control, cx)).await;
    let answer = match ready {
        Ok(()) => GrpcService::<Body>::call(&mut control, asked).await,
        Err(error) => Err(error),
    };
    answer.map_or_else(|error| panic!("control does not answer: {error}"), IntoResponse::into_response)
}

/// Serves an operator's browser, which has no certificate, in the clear on this machine's loopback: where.
fn served(deployment: &Deployment) -> SocketAddr {
    let (ready, address) = channel();
    let (namespace, page) = (deployment.fabric().control(), deployment.page_address());
    let operator = Protection::Mutual(Folder(deployment.operator()));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        // Connections to control are made by this thread.
        namespace.enter(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let control = Remote::at(&operator, "control", &page.to_string()).unwrap().connect_lazy();
                let pages = Router::new().fallback(move |request| forward(control.clone(), request));
                ready.send(listener.local_addr().unwrap()).unwrap();
                axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), pages).await.unwrap();
            });
        })
    });
    address.recv_timeout(PATIENCE).unwrap()
}

#[test]
fn the_page_shows_what_befalls_a_fabric() {
    let Some(program) = Chromium::program() else {
        return strict::skip_test("Debian's package chromium is missing: cargo xtask test installs it");
    };
    let measured = |setup: &mut Setup| {
        setup.unmanaged_hosts = 2;
        setup.measure(RATE);
    };
    let Some(deployment) = deploy(&racks_with_unmanaged_hosts(2, 2, 2, RATE), measured) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut browser = Chromium::start(&program, folder.path(), (1280, 1400)).unwrap();
    browser.load(&format!("http://{}/", served(&deployment))).unwrap();
    let count = |of: &str| format!("document.querySelectorAll('#picture path.link{of}').length");
    browser.wait_until(&format!("{} === 4", count("")), PATIENCE).unwrap();
    assert_eq!(browser.evaluate(&count(".failed")).unwrap(), 0);
    let table = |id: &str, text: &str| {
        format!("document.getElementById('{id}-table')?.textContent.includes('{text}')")
    };
    under_load_of(&sockets(&deployment, "a"), 250_000, |_| {
        browser.wait_until(&table("communicators", "a/"), PATIENCE).unwrap();
        assert_eq!(browser.evaluate("document.getElementById('connection').textContent").unwrap(), "live");
        let spine = plans::crossed_spine(&deployment, PATIENCE).unwrap();
        deployment.fabric().set_switch(&spine, false).unwrap();
        let took = browser.wait_until(&format!("{} > 0", count(".failed")), PATIENCE).unwrap();
        println!("links of a spine that is cut were seen as failed after {took:?}");

        // All that crosses from rack to rack has the other spine now.
        let other = if spine == "spine0" { "spine1" } else { "spine0" };
        let flow = CrossTraffic::start(deployment.fabric(), "f0", "f1", other, 50_000_000).unwrap();
        let took = browser.wait_until(&format!("{} > 0", count("[class*=cross]")), PATIENCE).unwrap();
        println!("those of the other, which is congested, after {took:?}");
        flow.stop().unwrap();
        browser.wait_until(&table("findings", "congest"), PATIENCE).unwrap();
    });
}
