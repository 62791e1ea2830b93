//! A headless Chromium, told through a pipe of its DevTools what to load, to type and to compute.

use crate::packages::on_path;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long the browser may take to answer.
const LIMIT: Duration = Duration::from_secs(30);

/// Hands the two ends of its pipes to the program after it, as those are called there.
const PIPES: &str = "exec \"$@\" 3<&0 4>&1 0</dev/null 1>/dev/null";

/// A browser with one page; ends when dropped.
#[derive(Debug)]
pub struct Chromium {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<Value>,
    number: u64,
    session: Option<String>,
}

impl Chromium {
    /// Where the program is; none where Debian's package `chromium` is not installed.
    pub fn program() -> Option<PathBuf> {
        on_path("chromium")
    }

    /// Starts one with an empty profile in `folder`, and a page of this size in pixels.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(program: &Path, folder: &Path, (width, height): (u32, u32)) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", PIPES, "sh"]).arg(program);
        command.args([
            "--headless",
            "--no-sandbox",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
            "--disable-sync",
            "--no-first-run",
            "--no-default-browser-check",
            "--hide-scrollbars",
        ]);
        command.arg(format!("--window-size={width},{height}"));
        command.arg(format!("--user-data-dir={}", folder.display())).env("HOME", folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("no browser")?;
        let commands = child.stdin.take().context("no pipe to the browser")?;
        let mut said = BufReader::new(child.stdout.take().context("no pipe from the browser")?);
        let (sink, answers) = channel();
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while said.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop();
                let Ok(value) = serde_json::from_slice(&message) else { return };
                if sink.send(value).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Self { child, commands, answers, number: 0, session: None };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target.get("targetId"), "flatten": true });
        let attached = browser.call("Target.attachToTarget", attach)?;
        browser.session = attached.get("sessionId").and_then(Value::as_str).map(str::to_owned);
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        browser.call("Emulation.setDeviceMetricsOverride", metrics)?;
        Ok(browser)
    }

    /// What a method of the DevTools protocol answers.
    ///
    /// # Errors
    /// Where it fails, or the browser does not answer in time.
    pub fn call(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.number += 1;
        let message = match &self.session {
            Some(session) => {
                json!({ "id": self.number, "method": method, "params": parameters, "sessionId": session })
            }
            None => json!({ "id": self.number, "method": method, "params": parameters }),
        };
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        self.commands.write_all(&bytes).context("the browser is gone")?;
        let deadline = Instant::now() + LIMIT;
        loop {
            let mut answer =
                match self.answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(answer) => answer,
                    Err(RecvTimeoutError::Timeout) => bail!("{method}: the browser does not answer"),
                    Err(RecvTimeoutError::Disconnected) => bail!("{method}: the browser is gone"),
                };
            if answer.get("id").and_then(Value::as_u64) != Some(self.number) {
                continue;
            }
            match answer.get("error") {
                Some(error) => bail!("{method}: {error}"),
                None => return Ok(answer.get_mut("result").map(Value::take).unwrap_or_default()),
            }
        }
    }

    /// Loads a page.
    ///
    /// # Errors
    /// Where it cannot be had.
    pub fn load(&mut self, url: &str) -> Result<()> {
        let answer = self.call("Page.navigate", json!({ "url": url }))?;
        match answer.get("errorText").and_then(Value::as_str) {
            Some(error) => bail!("{url}: {error}"),
            None => Ok(()),
        }
    }

    /// What an expression of the page's comes to; of a promise, what that does.
    ///
    /// # Errors
    /// Where it throws.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let parameters = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut answer = self.call("Runtime.evaluate", parameters)?;
        match answer.get("exceptionDetails") {
            Some(thrown) => bail!("{expression}: {thrown}"),
            None => Ok(answer.pointer_mut("/result/value").map(Value::take).unwrap_or_default()),
        }
    }

    /// Waits until an expression is true; how long that took.
    ///
    /// # Errors
    /// Where it is not within `limit`.
    pub fn wait_until(&mut self, expression: &str, limit: Duration) -> Result<Duration> {
        let began = Instant::now();
        while self.evaluate(expression)? != true {
            if began.elapsed() > limit {
                bail!("not within {limit:?}: {expression}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(began.elapsed())
    }

    /// Presses a key, such as "Tab" or "Enter".
    ///
    /// # Errors
    /// Where the browser refuses.
    pub fn press(&mut self, key: &str) -> Result<()> {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "ArrowLeft" => 37,
            "ArrowRight" => 39,
            other => bail!("no code of the key {other}"),
        };
        for kind in ["keyDown", "keyUp"] {
            // What the key writes is what presses a button.
            let text = if (key, kind) == ("Enter", "keyDown") { "\r" } else { "" };
            let event =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text });
            self.call("Input.dispatchKeyEvent", event)?;
        }
        Ok(())
    }

    /// Has pages take the reader to prefer "dark" or "light".
    ///
    /// # Errors
    /// Where the browser refuses.
    pub fn prefer(&mut self, scheme: &str) -> Result<()> {
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.call("Emulation.setEmulatedMedia", json!({ "features": [feature] })).map(drop)
    }

    /// A picture of the page as it is seen, as PNG.
    ///
    /// # Errors
    /// Where the browser makes none.
    pub fn picture(&mut self) -> Result<Vec<u8>> {
        let answer =
            self.call("Page.captureScreenshot", json!({ "format": "png", "optimizeForSpeed": false }))?;
        base64(answer.get("data").and_then(Value::as_str).context("no picture")?)
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The bytes that a text in base64 stands for.
fn base64(text: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for character in text.bytes().filter(|byte| *byte != b'=') {
        let value = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            other => bail!("{other} is no digit of base64"),
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count & 0xff) as u8);
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_gives_the_bytes_back() {
        assert_eq!(base64("aGFybW9uYWl6ZQ==").unwrap(), b"harmonaize");
        assert_eq!(base64("++//AAE=").unwrap(), [0xfb, 0xef, 0xff, 0, 1]);
        assert!(base64("a b").is_err());
    }
}
