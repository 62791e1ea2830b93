//! `harmonaize top`: what is measured, live in a terminal.

mod complete;
mod draw;
#[cfg(test)]
mod picture;
mod plans;
mod screen;
mod selection;
#[cfg(test)]
mod tests;
mod view;

use crate::Failure;
use crate::agent::{Agent, Socket};
use crate::control::ControlArguments;
use crate::operate::Operate;
use crate::output::PageArguments;
use harmonaize_api::v1::{ExplainReply, FabricSnapshot, PlansReply, Snapshot};
use harmonaize_planner::Nanos;
use harmonaize_program::has_colours;
use ratatui::DefaultTerminal;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event};
use ratatui::layout::Rect;
use screen::{Action, Screen};
pub(crate) use selection::Selection;
use serde_json::Value;
use std::io::IsTerminal;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tonic::Streaming;
use view::View;

/// Pause before a connection that broke is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Most decisions of control's that are shown.
const MAX_DECISIONS: u32 = 16;

/// Whose telemetry is watched.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// One agent's.
    Agent(Socket),
    /// All hosts', as control knows it, or what is selected of it.
    Control(ControlArguments, Selection),
}

/// What `top` was asked for.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Time between two pictures.
    pub interval: Nanos,
    /// Most flows.
    pub flows: u32,
    /// A single picture: how wide as text, and its format.
    pub once: Option<(u16, PageArguments)>,
    /// Rows without this text are left out.
    pub filter: String,
}

/// A stream of snapshots.
enum Stream {
    Agent(Agent, Streaming<Snapshot>),
    Control(Box<Operate>, Streaming<FabricSnapshot>, Selection),
}

impl Stream {
    async fn open(source: &Source, options: &Options) -> Result<Self, Failure> {
        match source {
            Source::Agent(socket) => {
                let mut agent = Agent::connect(socket).await?;
                let stream = agent.watch(options.interval, options.flows).await?;
                Ok(Self::Agent(agent, stream))
            }
            Source::Control(at, selection) => {
                let mut control = Operate::connect(at).await?;
                let stream = control.watch(options.interval).await?;
                Ok(Self::Control(Box::new(control), stream, selection.clone()))
            }
        }
    }

    /// The first picture with rates.
    async fn with_rates(&mut self) -> Result<View, Failure> {
        match self {
            Self::Agent(agent, stream) => Ok(View::agent(&snapshot_with_rates(agent, stream).await?)),
            Self::Control(..) => self.next().await,
        }
    }

    /// What the first picture with rates is made of.
    async fn complete(&mut self) -> Result<Value, Failure> {
        match self {
            Self::Agent(agent, stream) => Ok(complete::snapshot(&snapshot_with_rates(agent, stream).await?)),
            Self::Control(control, stream, selection) => {
                let (fabric, plans, decisions) = fabric(control, stream, selection).await?;
                Ok(complete::fabric(&fabric, &plans, &decisions))
            }
        }
    }

    async fn next(&mut self) -> Result<View, Failure> {
        match self {
            Self::Agent(agent, stream) => Ok(View::agent(&snapshot(agent, stream).await?)),
            Self::Control(control, stream, selection) => {
                let (fabric, plans, decisions) = fabric(control, stream, selection).await?;
                Ok(View::fabric(&fabric).with_plans(&plans, &decisions))
            }
        }
    }
}

async fn snapshot(agent: &Agent, stream: &mut Streaming<Snapshot>) -> Result<Snapshot, Failure> {
    let next = stream.message().await.map_err(|status| agent.failure(&status))?;
    next.ok_or_else(ended)
}

/// An agent's first snapshot with rates: the first of all has nothing that it compares with.
async fn snapshot_with_rates(agent: &Agent, stream: &mut Streaming<Snapshot>) -> Result<Snapshot, Failure> {
    let first = snapshot(agent, stream).await?;
    if first.interval_ns == 0 { snapshot(agent, stream).await } else { Ok(first) }
}

/// What is selected of control's next snapshot, with plans and the last decisions.
async fn fabric(
    control: &mut Operate,
    stream: &mut Streaming<FabricSnapshot>,
    selection: &Selection,
) -> Result<(FabricSnapshot, PlansReply, ExplainReply), Failure> {
    let next = stream.message().await.map_err(|status| control.failure(&status))?;
    let (mut fabric, mut plans) = (next.ok_or_else(ended)?, control.plans_of(None).await?);
    let mut decisions = control.decisions(None, MAX_DECISIONS).await?;
    selection.apply(&mut fabric, &mut plans, &mut decisions)?;
    Ok((fabric, plans, decisions))
}

fn ended() -> Failure {
    Failure::Refused("the other side has ended the stream".to_owned())
}

/// Runs until the reader quits; with `once`, gives one picture as text, or what it shows for programs.
pub(crate) async fn run(source: Source, options: Options) -> Result<String, Failure> {
    let mut screen = Screen::filtered(&options.filter);
    if let Some((width, print)) = &options.once {
        let mut stream = Stream::open(&source, &options).await?;
        if print.is_for_programs() {
            return Ok(print.page(&stream.complete().await?, Value::to_string));
        }
        return Ok(picture(&stream.with_rates().await?, &screen, *width));
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::Refused("top needs a terminal; `--once` prints one picture as text".to_owned()));
    }
    // The first connection may fail in words, before the screen is taken.
    let mut stream = Some(Stream::open(&source, &options).await?);
    let mut view = match &mut stream {
        Some(stream) => stream.next().await?,
        None => return Ok(String::new()),
    };
    let mut signals = Signals::new().map_err(|error| Failure::Refused(error.to_string()))?;
    // Heard of from the first picture on: the thread that reads keys begins to listen somewhat later.
    let resized = signal(SignalKind::window_change());
    let mut resized = resized.map_err(|error| Failure::Refused(error.to_string()))?;
    let mut terminal = Terminal::take().map_err(|error| Failure::Refused(error.to_string()))?;
    let mut input = input();
    let mut note = String::new();
    loop {
        terminal.show(&view, &screen, &note).map_err(|error| Failure::Refused(error.to_string()))?;
        tokio::select! {
            next = next(&mut stream, &source, &options) => match next {
                Ok(fresh) => {
                    note.clear();
                    if !screen.paused {
                        view = fresh;
                    }
                }
                Err(failure) => {
                    stream = None;
                    note = crate::text::clean(&format!("{failure}"));
                }
            },
            event = input.recv() => match event {
                Some(Event::Key(key)) => {
                    if screen.key(key, &view) == Action::Quit {
                        return Ok(String::new());
                    }
                }
                Some(_) => {}
                None => return Ok(String::new()),
            },
            // The next picture has the new size.
            _ = resized.recv() => {}
            () = signals.any() => return Ok(String::new()),
        }
    }
}

/// The next picture; connects again, after a while, where the connection broke.
async fn next(stream: &mut Option<Stream>, source: &Source, options: &Options) -> Result<View, Failure> {
    if stream.is_none() {
        tokio::time::sleep(RETRY).await;
        *stream = Some(Stream::open(source, options).await?);
    }
    match stream {
        Some(stream) => stream.next().await,
        None => Err(Failure::Refused("not connected".to_owned())),
    }
}

/// Everything as text, as high as it needs to be.
fn picture(view: &View, screen: &Screen, width: u16) -> String {
    let height = draw::full_height(view, screen).min(u16::MAX / width.max(1));
    let mut buffer = Buffer::empty(Rect { x: 0, y: 0, width, height });
    draw::draw(view, screen, "", &mut buffer);
    draw::lines(&buffer)
}

/// The screen, taken; given back however this ends, a panic included.
struct Terminal {
    screen: DefaultTerminal,
    colours: bool,
}

impl Terminal {
    fn take() -> std::io::Result<Self> {
        let colours = has_colours(true, std::env::var_os("NO_COLOR").as_deref());
        match ratatui::try_init() {
            Ok(screen) => Ok(Self { screen, colours }),
            Err(error) => {
                let _ = ratatui::try_restore();
                Err(error)
            }
        }
    }

    fn show(&mut self, view: &View, screen: &Screen, note: &str) -> std::io::Result<()> {
        let colours = self.colours;
        let drawn = self.screen.draw(|frame| {
            draw::draw(view, screen, note, frame.buffer_mut());
            if !colours {
                // By itself crossterm writes empty colours there, which end bold and reversed too.
                draw::without_colours(frame.buffer_mut());
            }
        });
        drawn.map(drop)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = ratatui::try_restore();
    }
}

/// Keys and changes of size, from a thread of their own; over when the terminal is.
fn input() -> mpsc::Receiver<Event> {
    let (events, receiver) = mpsc::channel(64);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if events.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

/// What ends a program from outside.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> std::io::Result<Self> {
        let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
        let [one, two, three] = kinds.map(signal);
        Ok(Self([one?, two?, three?]))
    }

    async fn any(&mut self) {
        let [one, two, three] = &mut self.0;
        tokio::select! {
            _ = one.recv() => {}
            _ = two.recv() => {}
            _ = three.recv() => {}
        }
    }
}
