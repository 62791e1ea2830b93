//! The tenant's events as an iterator.

use crate::blocking::{duration, lock};
use crate::dictionaries;
use crate::errors::raised;
use harmonaize_client as client;
use harmonaize_client::{Event, EventCursor};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long one question to the provider waits: what Ctrl-C may take.
const SLICE: Duration = Duration::from_millis(200);

/// A reader of the tenant's events. Iterated over it never ends.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Events {
    inner: Mutex<Reader>,
}

struct Reader {
    events: client::Events,
    /// Read, and not given yet.
    waiting: VecDeque<Event>,
    missed: u64,
}

impl Events {
    pub(crate) fn new(events: client::Events) -> Self {
        Self { inner: Mutex::new(Reader { events, waiting: VecDeque::new(), missed: 0 }) }
    }

    /// The next, or none until the deadline (none: never).
    fn next(&self, py: Python<'_>, deadline: Option<Instant>) -> PyResult<Option<Event>> {
        loop {
            let read = py.detach(|| {
                let mut reader = lock(&self.inner);
                if reader.waiting.is_empty() {
                    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                    let batch = reader.events.read(left.map_or(SLICE, |left| left.min(SLICE)))?;
                    reader.missed += batch.missed;
                    reader.waiting.extend(batch.events);
                }
                Ok(reader.waiting.pop_front())
            });
            if let Some(event) = read.map_err(|error| raised(py, &error))? {
                return Ok(Some(event));
            }
            py.check_signals()?;
            if deadline.is_some_and(|at| Instant::now() >= at) {
                return Ok(None);
            }
        }
    }
}

#[pymethods]
impl Events {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.next(py, None)?.map(|event| dictionaries::write(py, &dictionaries::of_event(&event))).transpose()
    }

    /// Those that come until `wait` seconds are over; at once where there are some.
    #[pyo3(signature = (wait = 0.0))]
    fn read<'py>(&self, py: Python<'py>, wait: f64) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let deadline = Instant::now().checked_add(duration(Some(wait))?);
        let Some(first) = self.next(py, deadline)? else { return Ok(Vec::new()) };
        let more: Vec<Event> = py.detach(|| lock(&self.inner).waiting.drain(..).collect());
        std::iter::once(&first)
            .chain(&more)
            .map(|event| dictionaries::write(py, &dictionaries::of_event(event)))
            .collect()
    }

    /// How many events this reader came too late for.
    #[getter]
    fn missed(&self, py: Python<'_>) -> u64 {
        py.detach(|| lock(&self.inner).missed)
    }

    /// Where it stands, to go on from in another process; none before the first read.
    #[getter]
    fn cursor(&self, py: Python<'_>) -> Option<(u64, u64)> {
        py.detach(|| lock(&self.inner).events.cursor()).map(|EventCursor { feed, next }| (feed, next))
    }
}
