//! Whether control answers this host, and how soon.

use super::{Config, Finding};
use harmonaize_api::v1::LeaderRequest;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_identity::{CONTROL, Folder, Protection, Remote, root_cause};
use std::time::{Duration, Instant};
use tonic::Code;

/// How long control may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// A slower answer delays joins and changes of plan noticeably.
const SOON: Duration = Duration::from_millis(50);

/// The certificate, and each control.
pub(super) async fn check(config: &Config) -> Vec<Finding> {
    let mut findings: Vec<Finding> = config.tls.iter().map(|tls| certificate(&Folder(tls.clone()))).collect();
    for address in config.controls() {
        findings.push(control(config, address).await);
    }
    findings
}

fn certificate(folder: &Folder) -> Finding {
    const CHECK: &str = "certificate";
    let [authorities, certificate, key, _] = folder.files();
    for path in [authorities, certificate, key] {
        if let Err(error) = std::fs::read(&path) {
            let remedy =
                "`harmonaize init` on control's machine makes it: copy its folder tls/hosts/NAME here";
            return Finding::wrong(CHECK, format!("{}: {error}", path.display()), remedy);
        }
    }
    Finding::fine(CHECK, folder.0.display().to_string())
}

/// Asks who leads, which whoever is let in may ask.
async fn control(config: &Config, address: &str) -> Finding {
    const CHECK: &str = "control";
    let wrong = |why: String| {
        let remedy = "is control running there, is its address right, and does its certificate come from the same \
             authority? Its log says why it refuses a host";
        Finding::wrong(CHECK, format!("{address}: {why}"), remedy)
    };
    let asked = async {
        let protection = Protection::choose(config.tls.clone(), config.insecure_loopback, address)
            .map_err(|error| error.to_string())?;
        let remote = Remote::at(&protection, CONTROL, address).map_err(|error| error.to_string())?;
        let channel = remote.connect().await.map_err(|error| root_cause(&error))?;
        let mut client = ProviderClient::new(channel);
        let begun = Instant::now();
        match client.leader(LeaderRequest {}).await {
            Ok(_) => Ok(begun.elapsed()),
            // It is let in, and what control says is for others.
            Err(status) if matches!(status.code(), Code::PermissionDenied | Code::ResourceExhausted) => {
                Ok(begun.elapsed())
            }
            // A certificate that is refused shows as an end of the connection, whichever way that is noticed.
            Err(status) => Err(root_cause(&status)),
        }
    };
    match tokio::time::timeout(PATIENCE, asked).await {
        Err(_) => wrong(format!("no answer within {} s", PATIENCE.as_secs())),
        Ok(Err(why)) => wrong(why),
        Ok(Ok(time)) => {
            let found = format!("{address} answers within {:.1} ms", time.as_secs_f64() * 1e3);
            if time > SOON {
                let remedy =
                    "joins and changes of plan take several such times: put control nearer to its hosts";
                return Finding::advice(CHECK, found, remedy);
            }
            Finding::fine(CHECK, found)
        }
    }
}
