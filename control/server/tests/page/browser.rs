//! The page in headless Chromium, before a running control with made-up agents.

use super::{FABRIC, HOSTILE, config, start};
use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::{self, from_agent};
use harmonaize_testkit::agents::LIMIT;
use harmonaize_testkit::chromium::Chromium;
use harmonaize_testkit::strict;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The script that finds texts and lines with too little contrast. A text is compared with what is behind it,
/// and a line with the ground.
const PALE: &str = r"(() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return { rgb: [r, g, b], a }; };
  const luminance = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const behind = (node) => { for (let at = node; at; at = at.parentElement) {
    const { rgb, a } = parse(getComputedStyle(at).backgroundColor); if (a === 1) return rgb; } return [255, 255, 255]; };
  const pale = [];
  let seen = 0;
  for (const node of document.body.querySelectorAll('*')) {
    if (!node.checkVisibility()) continue;
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    const style = getComputedStyle(node), svg = node.namespaceURI !== 'http://www.w3.org/1999/xhtml';
    if (own && !svg) { seen += 1; const of = contrast(parse(style.color).rgb, behind(node));
      if (of < 4.5) pale.push(`${node.tagName} ${node.textContent.slice(0, 20)} ${of.toFixed(2)}`); }
    if (node.classList.contains('link')) { seen += 1; const of = contrast(parse(style.stroke).rgb, behind(node));
      if (of < 3) pale.push(`${node.getAttribute('class')} ${of.toFixed(2)}`); }
  }
  return { seen, pale };
})()";

/// All that a reader can act on, and that is seen.
const CONTROLS: &str = r"[...document.querySelectorAll('a[href], button, input, [tabindex=\'0\']')]
  .filter((node) => node.checkVisibility()).map((node, index) => { node.dataset.control = index; return String(index); })";

/// What the agent of one rank reports of an operation that waits 8 ms for rank 2.
fn report(communicator: u64, rank: u32) -> v1::TelemetryReport {
    let called_ns = if rank == 2 { 1_008_000_000 } else { 1_000_000_000 };
    let timing = v1::RankTiming { rank, called_ns, ended_ns: 1_020_000_000, ..v1::RankTiming::default() };
    let operation = v1::Operation {
        communicator,
        operation: 7,
        bytes: 4096,
        participant: rank,
        ranks: vec![timing],
        complete: true,
        ..v1::Operation::default()
    };
    v1::TelemetryReport { sequence: 1, operations: vec![operation], ..v1::TelemetryReport::default() }
}

#[test]
fn an_operator_reads_it_in_a_browser() {
    let Some(program) = Chromium::program() else {
        return strict::skip_test("Debian's package chromium is missing: cargo xtask test installs it");
    };
    let (ready, addresses) = std::sync::mpsc::channel();
    // Control and agents go on while the browser is waited for.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (control, page) = start(config(FABRIC)).await;
            let mut played = FABRIC.connect(control).await.unwrap();
            let hosts = [0, 1, 4, 5];
            let id = played.form("a", "world", &hosts, LIMIT).await.unwrap();
            for (rank, host) in (0..).zip(hosts) {
                let message = from_agent::Message::Telemetry(report(id, rank));
                played.agents[host].send(message.into()).await.unwrap();
            }
            played.form(HOSTILE, HOSTILE, &[2, 3, 6, 7], LIMIT).await.unwrap();
            ready.send((control, page)).unwrap();
            std::future::pending::<()>().await;
        });
    });
    let (control, page) = addresses.recv_timeout(LIMIT).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut browser = Chromium::start(&program, folder.path(), (1280, 1400)).unwrap();
    browser.load(&format!("http://{page}/")).unwrap();
    let text = |id: &str, wanted: &str| {
        format!(
            "document.getElementById('{id}')?.textContent.includes({})",
            serde_json::to_string(wanted).unwrap()
        )
    };
    browser.wait_until(&text("communicators-table", "a/world"), LIMIT).unwrap();
    assert_eq!(browser.evaluate("document.getElementById('connection').textContent").unwrap(), "live");

    // Names are text.
    browser.wait_until(&text("tenants-table", HOSTILE), LIMIT).unwrap();
    assert_eq!(browser.evaluate("document.querySelectorAll('img, main script').length").unwrap(), 0);
    assert_eq!(browser.evaluate("document.title").unwrap(), "harmonaize");

    // The fabric: two racks with four hosts each, two spines, a line from each to each.
    assert_eq!(browser.evaluate("document.querySelectorAll('#picture .host').length").unwrap(), 8);
    assert_eq!(browser.evaluate("document.querySelectorAll('#picture path.link').length").unwrap(), 4);

    // What happens is pushed.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut operator = runtime.block_on(OperatorClient::connect(format!("http://{control}"))).unwrap();
    let add = v1::AddTenantRequest { name: "newcomer".to_owned(), ..v1::AddTenantRequest::default() };
    runtime.block_on(operator.add_tenant(add)).unwrap();
    let took = browser.wait_until(&text("tenants-table", "newcomer"), LIMIT).unwrap();
    println!("an added tenant was seen after {took:?}");
    let drain = v1::WithdrawRequest {
        targets: vec!["spine0".to_owned()],
        kind: v1::WithdrawalKind::Drain.into(),
        reason: "a reason".to_owned(),
        ..v1::WithdrawRequest::default()
    };
    runtime.block_on(operator.withdraw(drain)).unwrap();
    browser
        .wait_until("document.querySelectorAll('#picture path.link.withdrawn').length === 2", LIMIT)
        .unwrap();
    browser.wait_until(&text("findings-table", "a reason"), LIMIT).unwrap();

    // The keyboard reaches all there is to act on.
    let controls = browser.evaluate(CONTROLS).unwrap();
    let controls: BTreeSet<String> =
        controls.as_array().unwrap().iter().map(|control| control.as_str().unwrap().to_owned()).collect();
    assert!(controls.len() > 10, "{controls:?}");
    let mut reached = BTreeSet::new();
    browser.evaluate("document.activeElement.blur()").unwrap();
    for _ in 0..controls.len() * 2 {
        browser.press("Tab").unwrap();
        let focus = browser.evaluate("document.activeElement.dataset.control ?? null").unwrap();
        reached.extend(focus.as_str().map(str::to_owned));
    }
    assert_eq!(controls.difference(&reached).collect::<Vec<_>>(), Vec::<&String>::new());
    // Arrow keys move in the picture, and Enter selects.
    browser.evaluate("document.querySelector('#picture [tabindex=\"0\"]').focus()").unwrap();
    let label = "document.activeElement.getAttribute('aria-label')";
    let focus = browser.evaluate(label).unwrap();
    assert!(focus.as_str().unwrap().starts_with("spine spine0, drained"), "{focus}");
    for _ in 0..2 {
        browser.press("ArrowRight").unwrap();
    }
    let focus = browser.evaluate(label).unwrap();
    assert!(focus.as_str().unwrap().starts_with("rack r0: 4 hosts"), "{focus}");
    browser.press("Enter").unwrap();
    browser.wait_until(&text("detail", "leaf0 → spine1"), LIMIT).unwrap();
    // A communicator's route.
    browser.evaluate("document.querySelector('#communicators-table button').focus()").unwrap();
    browser.press("Enter").unwrap();
    browser.wait_until(&text("detail", "Communicator a/world"), LIMIT).unwrap();
    browser.wait_until("document.querySelectorAll('#picture .host.route').length === 4", LIMIT).unwrap();
    browser.wait_until(&text("detail", "leaf0 → spine"), LIMIT).unwrap();
    browser.wait_until("document.querySelectorAll('#picture path.route').length > 0", LIMIT).unwrap();

    // Its last operation's life, in bars and in words.
    browser.wait_until(&text("detail", "Rank 2 on h4 called last, 8 ms after the first."), LIMIT).unwrap();
    let drawn = "['.waits', '.moves'].map((of) => [...document.querySelectorAll('#detail .life ' + of)]
      .filter((bar) => bar.getAttribute('width') > 0).length)";
    assert_eq!(browser.evaluate(drawn).unwrap(), serde_json::json!([3, 4]));
    let label =
        browser.evaluate("document.querySelector('#detail .life').getAttribute('aria-label')").unwrap();
    assert!(label.as_str().unwrap().ends_with("The last result came after 20 ms."), "{label}");

    for scheme in ["light", "dark"] {
        browser.prefer(scheme).unwrap();
        let contrast = browser.evaluate(PALE).unwrap();
        assert_eq!(contrast["pale"].as_array().unwrap().len(), 0, "{scheme}: {}", contrast["pale"]);
        assert!(contrast["seen"].as_u64().unwrap() > 50, "{scheme}: {contrast}");
        let picture = browser.picture().unwrap();
        assert!(
            picture.starts_with(b"\x89PNG") && picture.len() > 10_000,
            "{scheme}: {} bytes",
            picture.len()
        );
        let kept = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("page-{scheme}.png"));
        std::fs::write(kept, picture).unwrap();
    }
    // Nothing went wrong on the way that the page would have hidden.
    assert_eq!(browser.evaluate("document.getElementById('connection').className").unwrap(), "");
}
