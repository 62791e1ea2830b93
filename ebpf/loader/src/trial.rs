//! Running the programs on packets that nobody sent: for tests, and to measure what a packet costs.

use crate::programs::{Programs, program_name};
use crate::{Error, sys};
use harmonaize_events::Direction;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// A packet to run a program on.
#[derive(Debug, Clone, Copy)]
pub struct Trial<'a> {
    /// Which program.
    pub direction: Direction,
    /// The packet, from its Ethernet header on; the kernel takes no fewer than 14 bytes.
    pub packet: &'a [u8],
    /// For a buffer of several packets: how many, and the payload's bytes in each. The kernel takes up to 65535.
    pub segments: Option<(u32, u32)>,
    /// How often.
    pub repeat: u32,
}

/// What a program returns for a packet that goes on (TCX_NEXT, TC_ACT_UNSPEC).
const TC_PASS: i32 = -1;
/// The same of XDP (XDP_PASS).
const XDP_PASS: i32 = 2;
/// The loopback interface's index, in every network namespace.
const LOOPBACK: u32 = 1;

/// `struct __sk_buff`, and where in it the fields lie that a run may set.
const CONTEXT: usize = 192;
const INTERFACE_AT: usize = 40;
const SEGMENTS_AT: usize = 164;
const SEGMENT_SIZE_AT: usize = 176;

impl Trial<'_> {
    /// Runs any classifier program on the packet, and returns the mean time of a run. The packet goes as if it crossed the
    /// loopback interface.
    ///
    /// # Errors
    /// The kernel does not take the packet (too short), or the program did not let it pass.
    pub fn run(&self, program: BorrowedFd<'_>) -> Result<Duration, Error> {
        let mut context = [0; CONTEXT];
        let mut set = |at: usize, value: u32| {
            if let Some(place) = context.get_mut(at..at + 4) {
                place.copy_from_slice(&value.to_ne_bytes());
            }
        };
        set(INTERFACE_AT, LOOPBACK);
        if let Some((segments, size)) = self.segments {
            set(SEGMENTS_AT, segments);
            set(SEGMENT_SIZE_AT, size);
        }
        let ran = sys::test_run(program, self.packet, &context, self.repeat)
            .map_err(|error| Error::call("running a program on a packet", error))?;
        if ran.returned != TC_PASS {
            return Err(Error::object(format!("a program returned {} for a packet", ran.returned)));
        }
        Ok(Duration::from_nanos(u64::from(ran.duration_ns)))
    }
}

impl Programs {
    /// The index that packets of a trial have.
    pub const TRIAL_INTERFACE: u32 = LOOPBACK;

    /// Runs the program on XDP on the trial's packet, as one that has just come in.
    ///
    /// # Errors
    /// As for [`Trial::run`]; the program was not asked for.
    pub fn trial_xdp(&mut self, trial: Trial<'_>) -> Result<Duration, Error> {
        self.register(LOOPBACK)?;
        let ran = sys::test_run(self.xdp_program()?, trial.packet, &[], trial.repeat)
            .map_err(|error| Error::call("running a program on a packet", error))?;
        if ran.returned != XDP_PASS {
            return Err(Error::object(format!("a program returned {} for a packet", ran.returned)));
        }
        Ok(Duration::from_nanos(u64::from(ran.duration_ns)))
    }

    /// Runs the program of the trial's direction. The packet goes nowhere; its counters and events are real.
    ///
    /// # Errors
    /// As for [`Trial::run`].
    pub fn trial(&mut self, trial: Trial<'_>) -> Result<Duration, Error> {
        self.register(LOOPBACK)?;
        let program = self.program(program_name(trial.direction))?;
        let fd = program.fd().map_err(|error| Error::object(error.to_string()))?;
        trial.run(fd.as_fd())
    }
}
