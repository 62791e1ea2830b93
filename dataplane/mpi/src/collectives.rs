//! The MPI's collectives, which go by the provider where it can carry them.

use crate::abi::Handle;
use crate::pmpi::pmpi;
use crate::run::{begin, run};
use std::ffi::{c_int, c_void};

/// A collective and its form that does not block.
macro_rules! collectives {
    ($($name:ident, $nonblocking:ident($($argument:ident: $type:ty),*) => $task:ident;)*) => {$(
        /// By the provider, or else by the MPI.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type,)* comm: Handle) -> c_int {
            let ran = run(stringify!($name), comm, |it| it.$task($($argument),*));
            ran.unwrap_or_else(|| (pmpi().$name)($($argument,)* comm))
        }

        /// The same, and the program waits for its request.
        #[unsafe(no_mangle)]
        pub extern "C" fn $nonblocking($($argument: $type,)* comm: Handle, request: *mut c_void) -> c_int {
            let begun = begin(stringify!($nonblocking), comm, request, |it| it.$task($($argument),*));
            begun.unwrap_or_else(|| (pmpi().$nonblocking)($($argument,)* comm, request))
        }
    )*};
}

/// A buffer that is read.
type In = *const c_void;
/// A buffer that is written.
type Out = *mut c_void;
/// Numbers by rank.
type Numbers = *const c_int;

collectives! {
    MPI_Allreduce, MPI_Iallreduce(send: In, recv: Out, count: c_int, dtype: Handle, operation: Handle) => allreduce;
    MPI_Reduce, MPI_Ireduce(send: In, recv: Out, count: c_int, dtype: Handle, operation: Handle, root: c_int) => reduce;
    MPI_Bcast, MPI_Ibcast(buffer: Out, count: c_int, dtype: Handle, root: c_int) => bcast;
    MPI_Allgather, MPI_Iallgather(send: In, send_count: c_int, send_type: Handle, recv: Out, recv_count: c_int, recv_type: Handle) => allgather;
    MPI_Allgatherv, MPI_Iallgatherv(send: In, send_count: c_int, send_type: Handle, recv: Out, counts: Numbers, places: Numbers, recv_type: Handle) => allgatherv;
    MPI_Alltoall, MPI_Ialltoall(send: In, send_count: c_int, send_type: Handle, recv: Out, recv_count: c_int, recv_type: Handle) => alltoall;
    MPI_Alltoallv, MPI_Ialltoallv(send: In, send_counts: Numbers, send_places: Numbers, send_type: Handle, recv: Out, recv_counts: Numbers, recv_places: Numbers, recv_type: Handle) => alltoallv;
    MPI_Reduce_scatter, MPI_Ireduce_scatter(send: In, recv: Out, counts: Numbers, dtype: Handle, operation: Handle) => reduce_scatter;
    MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block(send: In, recv: Out, count: c_int, dtype: Handle, operation: Handle) => reduce_scatter_block;
    MPI_Barrier, MPI_Ibarrier() => barrier;
}
