//! One rank's part. Each size runs out of place and in place, timed as nccl-tests does. It is checked, and
//! reported to rank 0.

use crate::arguments::Arguments;
use crate::launch::Seat;
use crate::measured::{Measured, SKEW, before, next, skewed_counts};
use crate::pattern::{Pattern, Value, factor};
use crate::report::{Place, Report, Row};
use anyhow::{Context, Result};
use half::{bf16, f16};
use harmonaize_client::{
    AttachOptions, Bool, Client, Collective, Communicator, Complex64, Complex128, Dtype, F8E4M3, F8E5M2,
    Operation, OperationOptions, Rank, ReduceOp, Tensor,
};
use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::Instant;

/// Operations in flight with `-z 0`.
const IN_FLIGHT: usize = 8;
/// Beside the tensors: what ranks tell each other.
const SLACK: u64 = 1 << 20;
/// Bytes of a rank's line about itself.
const LINE: usize = 256;

/// Runs the sweep; fails where a result was wrong.
pub(crate) fn run(arguments: &Arguments, seat: &Seat) -> Result<ExitCode> {
    let arena_bytes = arguments.max.0.saturating_mul(2).saturating_add(SLACK);
    let client =
        Client::attach(seat.agent.clone(), AttachOptions { arena_bytes, ..AttachOptions::default() })?;
    let communicator = client.join(&seat.name, Rank(seat.rank), seat.ranks, arguments.timeout())?;
    let factor = Some(factor(seat.rank).into());
    let communicator = communicator.with(OperationOptions { factor, ..OperationOptions::default() })?;
    let member = Member { arguments, seat, client, communicator };
    let lines = member.lines()?;
    let mut report = (seat.rank == 0).then(|| Report::begin(arguments, seat.ranks, &lines)).transpose()?;
    let measured = arguments.collective.measured;
    let reductions = if measured.reduces() { arguments.op.0.clone() } else { vec![("none", ReduceOp::Sum)] };
    let roots = match arguments.root {
        _ if !measured.is_rooted() => vec![-1],
        -1 => (0..seat.ranks).map(i64::from).collect(),
        root => vec![root],
    };
    for (type_name, dtype) in &arguments.datatype.0 {
        for (op_name, reduce) in reductions.iter().filter(|(_, reduce)| reduce.takes(*dtype)) {
            for root in &roots {
                let case = Case { type_name, op_name, reduce: *reduce, root: *root };
                member.sweep(*dtype, &case, &mut report)?;
            }
        }
    }
    member.barrier()?;
    match report {
        Some(report) => report.end(),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// What was started at once: an operation, or both ends of messages.
type Started = [Option<Operation>; 2];

struct Case<'a> {
    type_name: &'a str,
    op_name: &'a str,
    reduce: ReduceOp,
    root: i64,
}

struct Member<'a> {
    arguments: &'a Arguments,
    seat: &'a Seat,
    client: Client,
    communicator: Communicator,
}

/// What a rank measured of one size, in microseconds; and elements that were wrong.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    mean: f64,
    p50: f64,
    p99: f64,
    max: f64,
    wrong: f64,
}

impl Member<'_> {
    fn sweep(&self, dtype: Dtype, case: &Case<'_>, report: &mut Option<Report>) -> Result<()> {
        match dtype {
            Dtype::I8 => self.sizes::<i8>(case, report),
            Dtype::U8 => self.sizes::<u8>(case, report),
            Dtype::I16 => self.sizes::<i16>(case, report),
            Dtype::U16 => self.sizes::<u16>(case, report),
            Dtype::I32 => self.sizes::<i32>(case, report),
            Dtype::U32 => self.sizes::<u32>(case, report),
            Dtype::I64 => self.sizes::<i64>(case, report),
            Dtype::U64 => self.sizes::<u64>(case, report),
            Dtype::F16 => self.sizes::<f16>(case, report),
            Dtype::Bf16 => self.sizes::<bf16>(case, report),
            Dtype::F32 => self.sizes::<f32>(case, report),
            Dtype::F64 => self.sizes::<f64>(case, report),
            Dtype::F8E4M3 => self.sizes::<F8E4M3>(case, report),
            Dtype::F8E5M2 => self.sizes::<F8E5M2>(case, report),
            Dtype::Bool => self.sizes::<Bool>(case, report),
            Dtype::Complex64 => self.sizes::<Complex64>(case, report),
            Dtype::Complex128 => self.sizes::<Complex128>(case, report),
        }
    }

    fn sizes<T: Value>(&self, case: &Case<'_>, report: &mut Option<Report>) -> Result<()> {
        for bytes in [self.arguments.max.0, self.arguments.min.0] {
            let run = Run::<T>::new(self, bytes, case)?;
            for _ in 0..self.arguments.warmup {
                run.start(false)?.map(|operation| self.end(operation)).transpose()?;
            }
        }
        for bytes in self.arguments.sizes() {
            let run = Run::<T>::new(self, bytes, case)?;
            let (out_of_place, in_place) = (run.measure(false)?, run.measure(true)?);
            if let Some(report) = report {
                report.row(Row {
                    bytes: run.larger() * size_of::<T>() as u64,
                    count: run.pattern.count,
                    type_name: case.type_name.to_owned(),
                    op_name: case.op_name.to_owned(),
                    root: case.root,
                    out_of_place,
                    in_place,
                })?;
            }
        }
        Ok(())
    }

    fn end(&self, started: Started) -> Result<()> {
        for mut operation in started.into_iter().flatten() {
            operation.wait(self.arguments.timeout())?;
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.end([Some(self.communicator.barrier()?), None])
    }

    /// Each rank's line about itself, in order.
    fn lines(&self) -> Result<Vec<String>> {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let line = format!(
            "#  Rank {:2} Group {:2} Pid {:6} on {:>10} device {:2} [{:04x}:{:02x}:{:02x}] {}",
            self.seat.rank,
            0,
            std::process::id(),
            host.trim(),
            0,
            0,
            0,
            0,
            "host memory"
        );
        let mut own = line.into_bytes();
        own.resize(LINE, 0);
        let all = self.gather(&own)?;
        let text = |line: &[u8]| String::from_utf8_lossy(line).trim_end_matches('\0').to_owned();
        Ok(all.chunks(LINE).map(text).collect())
    }

    /// What all ranks say, in order.
    fn gather<T: Value>(&self, own: &[T]) -> Result<Vec<T>> {
        let elements = own.len() as u64;
        let input = self.client.tensor(T::DTYPE, elements)?;
        let output = self.client.tensor(T::DTYPE, elements * u64::from(self.seat.ranks))?;
        input.write(0, own)?;
        self.end([Some(self.communicator.all_gather(&input, &output)?), None])?;
        let mut all = vec![T::default(); own.len() * self.seat.ranks as usize];
        output.read(0, &mut all)?;
        Ok(all)
    }

    /// Microseconds of an operation in the mean, and of each by itself: with operations in flight, since the one before.
    fn time(&self, start: impl Fn() -> Result<Option<Started>>) -> Result<(f64, Vec<f64>)> {
        let (iterations, blocking) = (self.arguments.iters, self.arguments.blocking);
        let mut each = Vec::with_capacity(iterations as usize);
        let (began, mut apart) = (Instant::now(), 0.0);
        let mut flying = VecDeque::new();
        let mut last = began;
        let us = |since: Instant| since.elapsed().as_secs_f64() * 1e6;
        for _ in 0..iterations {
            if blocking != 0 {
                last = Instant::now();
            } else if flying.len() >= IN_FLIGHT
                && let Some(operation) = flying.pop_front()
            {
                self.end(operation)?;
                each.push(us(last));
                last = Instant::now();
            }
            let Some(operation) = start()? else { return Ok((0.0, Vec::new())) };
            flying.push_back(operation);
            if blocking != 0 {
                flying.pop_front().map(|operation| self.end(operation)).transpose()?;
                each.push(us(last));
                let waits = Instant::now();
                if blocking != 2 {
                    self.barrier()?;
                }
                apart += if blocking == 3 { us(waits) } else { 0.0 };
            }
        }
        for operation in flying {
            self.end(operation)?;
            each.push(us(last));
            last = Instant::now();
        }
        Ok(((us(began) - apart) / f64::from(iterations), each))
    }
}

/// One size.
struct Run<'a, T> {
    member: &'a Member<'a>,
    pattern: Pattern,
    input: Tensor,
    output: Tensor,
    of: std::marker::PhantomData<T>,
}

impl<'a, T: Value> Run<'a, T> {
    fn new(member: &'a Member<'a>, bytes: u64, case: &Case<'_>) -> Result<Self> {
        let measured = member.arguments.collective.measured;
        let (elements, ranks) = (bytes / size_of::<T>() as u64, member.seat.ranks);
        // As nccl-tests: blocks are multiples of 16 bytes.
        let align = 16 / size_of::<T>() as u64;
        let whole = measured.max_blocks(ranks) == 1;
        let blocks = u64::from(measured.max_blocks(ranks)).max(1);
        let count = if whole { elements } else { elements / blocks / align * align };
        let root = u32::try_from(case.root).unwrap_or(0);
        let (rank, reduce) = (member.seat.rank, case.reduce);
        let [of_input, of_output] = measured.blocks(ranks, Rank(rank), Rank(root));
        let pattern = Pattern { measured, reduce, root, rank, ranks, count };
        let tensor = |blocks: u32| member.client.tensor(T::DTYPE, count * u64::from(blocks));
        Ok(Self {
            member,
            pattern,
            input: tensor(of_input)?,
            output: tensor(of_output)?,
            of: std::marker::PhantomData,
        })
    }

    /// Elements of the largest tensor of any rank.
    fn larger(&self) -> u64 {
        self.pattern.count * u64::from(self.pattern.measured.max_blocks(self.pattern.ranks))
    }

    /// What stands for both tensors in place: the larger one.
    fn both(&self) -> &Tensor {
        if self.input.elements() > self.output.elements() { &self.input } else { &self.output }
    }

    /// Where input and output are, and from which element on.
    fn places(&self, in_place: bool) -> [(&Tensor, u64); 2] {
        let Pattern { measured, rank, root, count, .. } = self.pattern;
        if !in_place {
            return [(&self.input, 0), (&self.output, 0)];
        }
        let [of_input, of_output] = measured.shared_block(Rank(rank), Rank(root)).unwrap_or_default();
        [of_output, of_input].map(|at| (self.both(), u64::from(at) * count))
    }

    /// Submits the operation; none where there is nothing to move, or it is never in place.
    fn start(&self, in_place: bool) -> Result<Option<Started>> {
        let (communicator, reduce) = (&self.member.communicator, self.pattern.reduce);
        let (input, output, both) = (&self.input, &self.output, self.both());
        let root = Rank(self.pattern.root);
        if self.pattern.count == 0 {
            return Ok(None);
        }
        let collective = match self.pattern.measured {
            Measured::Collective(collective) => collective,
            Measured::AllToAllV => {
                let [send, receive] =
                    skewed_counts(self.member.communicator.rank(), self.pattern.ranks, self.pattern.count);
                let most = self.pattern.count.saturating_mul(SKEW.into());
                return Ok(Some([
                    Some(communicator.all_to_all_v(input, &send, output, &receive, most)?),
                    None,
                ]));
            }
            Measured::SendRecv => {
                let (rank, ranks) = (Rank(self.pattern.rank), self.pattern.ranks);
                let received = communicator.recv(output, before(rank, ranks))?;
                return Ok(Some([Some(communicator.send(input, next(rank, ranks))?), Some(received)]));
            }
        };
        let operation = match (collective, in_place) {
            (Collective::AllReduce, false) => communicator.all_reduce(input, output, reduce)?,
            (Collective::AllReduce, true) => communicator.all_reduce_in_place(both, reduce)?,
            (Collective::AllGather, false) => communicator.all_gather(input, output)?,
            (Collective::AllGather, true) => communicator.all_gather_in_place(both)?,
            (Collective::ReduceScatter, false) => communicator.reduce_scatter(input, output, reduce)?,
            (Collective::ReduceScatter, true) => communicator.reduce_scatter_in_place(both, reduce)?,
            (Collective::Broadcast, false) => communicator.broadcast_into(Some(input), output, root)?,
            (Collective::Broadcast, true) => communicator.broadcast(both, root)?,
            (Collective::Reduce, false) => communicator.reduce(input, Some(output), reduce, root)?,
            (Collective::Reduce, true) => communicator.reduce_in_place(both, reduce, root)?,
            (Collective::Gather, false) => communicator.gather(input, Some(output), root)?,
            (Collective::Gather, true) => communicator.gather_in_place(both, root)?,
            (Collective::Scatter, false) => communicator.scatter(Some(input), output, root)?,
            (Collective::Scatter, true) => communicator.scatter_in_place(both, root)?,
            (Collective::AllToAll, false) => communicator.all_to_all(input, output)?,
            _ => return Ok(None),
        };
        Ok(Some([Some(operation), None]))
    }

    /// Clears the output, and puts the input where the operation looks for it.
    fn fill(&self, in_place: bool) -> Result<()> {
        let [(input, first), (output, start)] = self.places(in_place);
        output.write(start, &vec![T::default(); usize::try_from(self.output.elements())?])?;
        input.write(first, &self.pattern.write::<T>(self.input.elements()))?;
        Ok(())
    }

    /// Elements of the output that are not what they must be.
    fn wrong(&self, in_place: bool) -> Result<u64> {
        let Pattern { measured, ranks, rank, root, .. } = self.pattern;
        let [_, blocks] = measured.blocks(ranks, Rank(rank), Rank(root));
        let [_, (tensor, first)] = self.places(in_place);
        let mut found = vec![T::default(); usize::try_from(self.pattern.count)?];
        let mut wrong = 0;
        for block in 0..blocks {
            tensor.read(first + u64::from(block) * self.pattern.count, &mut found)?;
            wrong += self.pattern.wrong(block, &found);
        }
        Ok(wrong)
    }

    /// Times and checks it one way; none where it never runs that way.
    fn measure(&self, in_place: bool) -> Result<Option<Place>> {
        let member = self.member;
        if in_place && !self.pattern.measured.can_be_in_place() {
            return Ok(None);
        }
        self.fill(in_place)?;
        self.start(in_place)?.map(|operation| member.end(operation)).transpose()?;
        member.barrier()?;
        let (mean, mut each) = member.time(|| self.start(in_place))?;
        each.sort_by(f64::total_cmp);
        // The nearest rank, as nccl-tests.
        let percentile = |of: f64| {
            let at = (of * each.len() as f64).ceil() as usize;
            each.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        let mut measured =
            Times { mean, p50: percentile(0.5), p99: percentile(0.99), max: percentile(1.0), wrong: 0.0 };
        member.barrier()?;
        for _ in 0..member.arguments.check {
            self.fill(in_place)?;
            let Some(operation) = self.start(in_place)? else { break };
            member.end(operation)?;
            measured.wrong += self.wrong(in_place)? as f64;
            member.barrier()?;
        }
        self.place(&measured).map(Some)
    }

    /// What all ranks measured, as one.
    fn place(&self, own: &Times) -> Result<Place> {
        let all = self.member.gather(&[own.mean, own.p50, own.p99, own.max, own.wrong])?;
        let column = |at: usize| all.iter().skip(at).step_by(5).copied();
        let greatest = |at: usize| column(at).fold(0.0, f64::max);
        let time_us = match self.member.arguments.average {
            0 => column(0).next().unwrap_or(0.0),
            1 => column(0).sum::<f64>() / f64::from(self.pattern.ranks),
            2 => column(0).fold(f64::INFINITY, f64::min),
            _ => greatest(0),
        };
        let (slowest_rank, slowest_us) =
            column(0).enumerate().max_by(|one, other| one.1.total_cmp(&other.1)).context("no ranks")?;
        let bytes = (self.larger() * size_of::<T>() as u64) as f64;
        let algbw = if time_us > 0.0 { bytes / time_us / 1e3 } else { 0.0 };
        Ok(Place {
            time_us,
            algbw,
            busbw: algbw * self.pattern.measured.bus_factor(self.pattern.ranks),
            wrong: (self.member.arguments.check > 0).then(|| column(4).sum::<f64>() as u64),
            p50_us: greatest(1),
            p99_us: greatest(2),
            max_us: greatest(3),
            slowest_rank,
            slowest_us,
        })
    }
}
