/*
 * harmonaize: collectives as a service of the cloud provider. The tenant's library for C.
 *
 * Every function that can fail answers a status; what went wrong in particular is in harmonaize_last_error, for the
 * calling thread alone. NULL and values that mean nothing are answered with HARMONAIZE_ERROR_INVALID_ARGUMENT.
 *
 * Handles are opaque. Whatever makes one gives it to the caller, who frees it once, in any order, with the function
 * that its type has for it; where nothing was made the place has NULL. Handles may go from thread to thread. The
 * comment of each type says whether threads may use one at the same time. Nobody may use one while it is freed.
 *
 * Structures with options begin with their size, and zeros mean the usual:
 *
 *     harmonaize_join_options_t options = {.size = sizeof options, .job = "run-17"};
 *
 * Times are in nanoseconds, texts are UTF-8 with a NUL at their end. A signal handler calls none of these functions.
 *
 * Made by cbindgen from dataplane/c/src.
 */

#ifndef HARMONAIZE_H
#define HARMONAIZE_H

#include <stddef.h>
#include <stdint.h>

// No `reason`.
#define HARMONAIZE_REASON_NONE 0

// The name is empty, too long, or has control characters.
#define HARMONAIZE_REASON_NAME 1

// The rank is not below the number of ranks, or there are no ranks at all.
#define HARMONAIZE_REASON_RANK 2

// Another process has this rank.
#define HARMONAIZE_REASON_TAKEN 3

// Ranks disagree on how many they are.
#define HARMONAIZE_REASON_SIZE 4

// Some ranks never came: `ranks`.
#define HARMONAIZE_REASON_TIMEOUT 5

// As many communicators or ranks as the tenant may have.
#define HARMONAIZE_REASON_QUOTA 6

// A rank that had come went away before all were there: `ranks`.
#define HARMONAIZE_REASON_RANK_LOST 7

// The provider cannot form communicators at the moment.
#define HARMONAIZE_REASON_UNAVAILABLE 8

// A bug or broken invariant in the agent.
#define HARMONAIZE_REASON_INTERNAL 9

// The budget makes no sense, or ranks name different ones.
#define HARMONAIZE_REASON_BUDGET 10

// The communicator to go on from, or to split, is over.
#define HARMONAIZE_REASON_OVER 11

// Nanoseconds that are never over: some 584 years.
#define HARMONAIZE_FOREVER UINT64_MAX

// How the agent reaches tensors: both map the arena.
#define HARMONAIZE_ACCESS_MAPPED 0

// Nothing is mapped: tensors travel over the socket.
#define HARMONAIZE_ACCESS_REMOTE 1

// No rank: of a newcomer before a regroup, of an operation without another end.
#define HARMONAIZE_NO_RANK UINT32_MAX

// No color: the rank is in no communicator that comes of a split.
#define HARMONAIZE_NO_COLOR UINT32_MAX

// Nothing had to be done.
#define HARMONAIZE_ALGORITHM_NONE 0

// Within one host.
#define HARMONAIZE_ALGORITHM_WITHIN_HOST 1

// A ring of hosts.
#define HARMONAIZE_ALGORITHM_RING 2

// Pairs of hosts.
#define HARMONAIZE_ALGORITHM_PAIRWISE 3

// A chain of hosts.
#define HARMONAIZE_ALGORITHM_CHAIN 4

// Dissemination among hosts.
#define HARMONAIZE_ALGORITHM_DISSEMINATION 5

// Direct exchange among hosts, in fewer bits than the tensor has.
#define HARMONAIZE_ALGORITHM_DIRECT_CODED 6

// Direct exchange among hosts: everything from each to all.
#define HARMONAIZE_ALGORITHM_ONE_SHOT 7

// Direct exchange among hosts: from each to who adds a part up, and from there to all.
#define HARMONAIZE_ALGORITHM_TWO_SHOT 8

// Sums by an aggregator on the way.
#define HARMONAIZE_ALGORITHM_AGGREGATED 9

// Bytes of a codec's name, with the NUL at its end.
#define HARMONAIZE_CODEC_BYTES 24

// No step: none is known to be whole at all ranks.
#define HARMONAIZE_NO_STEP UINT64_MAX

// Others' traffic slows the tenant's communicators: `level`.
#define HARMONAIZE_EVENT_CONGESTION 1

// Something of the network is out of use, which slows them: `level`.
#define HARMONAIZE_EVENT_CAPACITY 2

// Ranks are lost: `ranks`, and `at_ns` until when the others are expected to regroup, 0 where that was not agreed on.
#define HARMONAIZE_EVENT_FAILURE 3

// The hosts of `ranks` will be taken away, the first at `at_ns`; of none: it is called off, or over.
#define HARMONAIZE_EVENT_MAINTENANCE 4

// Some operations of the tenant's take another way since then.
#define HARMONAIZE_EVENT_PLAN_CHANGED 5

// `waiting` processes wait to be taken in when members regroup.
#define HARMONAIZE_EVENT_NEWCOMERS 6

// Of what was agreed on, `clauses` are not kept now; none: it is kept again.
#define HARMONAIZE_EVENT_AGREEMENT_BROKEN 7

// It went on from another, and `clauses` of what was agreed on cannot be had any more.
#define HARMONAIZE_EVENT_AGREEMENT_ENDED 8

// Of the communicator these `ranks`, and no others, call late and hold its operations up; none: no rank does any more.
#define HARMONAIZE_EVENT_COMPUTE_STRAGGLERS 9

// This one of `ranks` is behind a slow link and holds the communicator's operations up; none: it does no more.
#define HARMONAIZE_EVENT_NETWORK_STRAGGLERS 10

// An event that this version has no name for.
#define HARMONAIZE_EVENT_OTHER 0

// Nothing worth reporting.
#define HARMONAIZE_LEVEL_NONE 0

// Up to half of the expected rate is lost.
#define HARMONAIZE_LEVEL_MILD 1

// More than half of the expected rate is lost.
#define HARMONAIZE_LEVEL_SEVERE 2

// The usual share of what is shared with others.
#define HARMONAIZE_PRIORITY_NORMAL 0

// A quarter of it; nothing is promised.
#define HARMONAIZE_PRIORITY_LOW 1

// Four times as much.
#define HARMONAIZE_PRIORITY_HIGH 2

// When it fails, its members may regroup, and nothing is kept for them.
#define HARMONAIZE_ON_FAILURE_NOTHING 0

// When it fails, it is over.
#define HARMONAIZE_ON_FAILURE_END 1

// When it fails, its place is kept for its members to regroup.
#define HARMONAIZE_ON_FAILURE_REGROUP 2

// What may be lost of tensors.
#define HARMONAIZE_CLAUSE_BUDGET 1

// Targets for single operations.
#define HARMONAIZE_CLAUSE_COMPLETION 2

// The target for an iteration.
#define HARMONAIZE_CLAUSE_ITERATION 4

// The priority.
#define HARMONAIZE_CLAUSE_PRIORITY 8

// The weight.
#define HARMONAIZE_CLAUSE_WEIGHT 16

// The least bus bandwidth.
#define HARMONAIZE_CLAUSE_BANDWIDTH 32

// Whether aggregators sum.
#define HARMONAIZE_CLAUSE_AGGREGATION 64

// What becomes of it when it fails.
#define HARMONAIZE_CLAUSE_ON_FAILURE 128

// The order of sums.
#define HARMONAIZE_CLAUSE_ORDER 256

// Most targets for single operations.
#define HARMONAIZE_TARGETS 4

// Bytes of a budget's text in constraints, with the NUL at its end.
#define HARMONAIZE_BUDGET_BYTES 120

// Nothing speaks for anything else.
#define HARMONAIZE_CHOICE_USUAL 0

// The network is slow now.
#define HARMONAIZE_CHOICE_SLOW 1

// Hosts will be taken away.
#define HARMONAIZE_CHOICE_MAINTENANCE 2

// The longest time between two checkpoints is over.
#define HARMONAIZE_CHOICE_DUE 3

// The provider cannot be asked now.
#define HARMONAIZE_CHOICE_UNKNOWN 4

// An attachment to the agent. Any thread may use it, at the same time as others. It ends when it and all that came of it are
// freed, in whichever order.
//
// It belongs to the process that attached. In a child by `fork` every function answers `HARMONAIZE_ERROR_FORKED`, but
// for those that free, which then do nothing to the parent's.
typedef struct harmonaize_client_t harmonaize_client_t;

// A member's view of a communicator. All ranks call the same collectives in the same order. Any thread may use it, at the
// same time as others; threads that call side by side need an order among themselves that is the same at all ranks. Left
// when it, all that were made `with` options or a group, and its operations are freed.
typedef struct harmonaize_communicator_t harmonaize_communicator_t;

// A descriptor for `poll` or `epoll`: readable once operations of the attachment have ended, until it is cleared. Readable at
// first. Any thread may use it, at the same time as others.
typedef struct harmonaize_completions_t harmonaize_completions_t;

// A reader of the tenant's events, over all its communicators. Any thread may use it, one at a time: while one reads, others
// are answered `HARMONAIZE_ERROR_IN_USE`. One reader of an attachment can wait at a time.
typedef struct harmonaize_events_t harmonaize_events_t;

// What operations have left out of one tensor's sums so far. Any thread may use it, at the same time as others; one operation
// at a time.
typedef struct harmonaize_feedback_t harmonaize_feedback_t;

// Calls that are checked one by one and submitted together when the group ends. Any thread may use it, at the same time as
// others. Freed before its end, none of them was called.
typedef struct harmonaize_group_t harmonaize_group_t;

// A collective, a send or a receive in flight. Any thread may use it, one at a time: while one waits, others are answered
// `HARMONAIZE_ERROR_IN_USE`. Freed before its end, it goes on, and its tensors' memory stays taken until then.
typedef struct harmonaize_operation_t harmonaize_operation_t;

// Tensors whose contents survive the loss of ranks. Any thread may use it, one at a time: while one seals, waits, writes or
// restores, others are answered `HARMONAIZE_ERROR_IN_USE`. The tensors' own handles may be freed before it; their memory
// stays taken until then.
typedef struct harmonaize_protection_t harmonaize_protection_t;

// A range of a memfd of the process's own that the agent has mapped. Any thread may use it, at the same time as others. Let
// go when it and all tensors on it are freed and no operation on them is in flight.
typedef struct harmonaize_region_t harmonaize_region_t;

// What came of a restore: a step, who is lost, and states of ranks. Any thread may use it, at the same time as others. The
// states take room in the arena until it is freed.
typedef struct harmonaize_restored_t harmonaize_restored_t;

// Elements of one type in memory that process and agent both reach. Any thread may use it, at the same time as others;
// what they write to its bytes at the same time is their own business. Its memory is free again when it and its slices are
// freed and no operation on it is in flight.
typedef struct harmonaize_tensor_t harmonaize_tensor_t;

// What a function answers: `HARMONAIZE_OK`, `HARMONAIZE_IN_PROGRESS`, or an error. Codes are stable.
typedef int32_t harmonaize_status_t;

// What went wrong in the last call of this thread that failed.
typedef struct harmonaize_error_t {
    // What the call answered.
    harmonaize_status_t status;
    // Why a join, a regroup or a split failed: `HARMONAIZE_REASON_...`.
    uint32_t reason;
    // For people: what happened, which value, what to do.
    const char *text;
    // Ranks concerned: those that are late, lost or taken, or the one that aborted. NULL where there are none.
    const uint32_t *ranks;
    // How many those are.
    size_t rank_count;
    // After `HARMONAIZE_ERROR_TOO_OFTEN`: nanoseconds until a question will be answered.
    uint64_t retry_after_ns;
} harmonaize_error_t;

// How to attach. What is 0 is as usual.
typedef struct harmonaize_attach_options_t {
    // `sizeof` of this structure.
    size_t size;
    // How the agent reaches tensors: `HARMONAIZE_ACCESS_...`.
    uint32_t access;
    // Most operations in flight, a power of two; 64 as usual.
    uint32_t entries;
    // Bytes for all tensors together, at first; 64 MiB as usual.
    uint64_t arena_bytes;
    // Bytes up to which the arena grows by itself; as usual up to the tenant's quota. 1: it does not grow.
    uint64_t max_arena_bytes;
    // Nanoseconds that waiting spins before it sleeps; 50 us as usual.
    uint64_t spin_ns;
    // Nanoseconds that each answer of the agent may take during the handshake; 10 s as usual.
    uint64_t timeout_ns;
} harmonaize_attach_options_t;

// The type of a tensor's elements: `HARMONAIZE_I8` and so on.
typedef uint32_t harmonaize_dtype_t;

// How to join. What is 0 or NULL is as usual.
typedef struct harmonaize_join_options_t {
    // `sizeof` of this structure.
    size_t size;
    // The job: communicators of two of the tenant's jobs never meet, though they are named alike. As usual there is none.
    const char *job;
    // What may be lost of tensors, the same at all ranks: "exact" as usual, "bf16", "vnmse=0.01", or names of codecs
    // separated by commas.
    const char *budget;
    // Nanoseconds to wait for the other ranks; 60 s as usual.
    uint64_t timeout_ns;
    // Nanoseconds that operations wait for late ranks; 10 min as usual, or as long as the operator allows.
    uint64_t operation_timeout_ns;
} harmonaize_join_options_t;

// How to go on with other ranks. What is 0 or NULL is as usual.
typedef struct harmonaize_regroup_options_t {
    // `sizeof` of this structure.
    size_t size;
    // Nanoseconds to wait for members that neither come nor go; 60 s as usual.
    uint64_t timeout_ns;
    // Nanoseconds that operations wait for late ranks; of a member as before, as usual.
    uint64_t operation_timeout_ns;
    // New ranks ascend by this; as usual by the ranks before, and newcomers come last.
    const uint32_t *key;
    // Fewest ranks to go on with; 1 as usual.
    uint32_t min_ranks;
} harmonaize_regroup_options_t;

// What a rank says of an operation beside what it computes. What is 0 or NULL is as usual. Ranks need not say the same.
typedef struct harmonaize_operation_options_t {
    // `sizeof` of this structure.
    size_t size;
    // Nanoseconds that it waits for late ranks; as the join said, as usual.
    uint64_t timeout_ns;
    // Wanted nanoseconds from call to end; none are wanted, as usual. The earliest goes first among equals of class and priority.
    uint64_t deadline_ns;
    // The step of the job that it belongs to, from 1; 0 is unknown. Of equals the oldest goes first.
    uint64_t iteration;
    // What `HARMONAIZE_PREMUL_SUM` multiplies this rank's input by; 1 as usual.
    const double *factor;
    // Within its class, operations of a higher priority go first. 0 is the usual.
    uint8_t priority;
    // Class among the tenant's operations: 1 latency, 2 normal, 3 bulk, 4 background; else by its size.
    uint8_t tensor_class;
} harmonaize_operation_options_t;

// How elements are reduced: `HARMONAIZE_SUM` and so on. Not every type has all of them.
typedef uint32_t harmonaize_reduce_t;

// What an operation that succeeded cost.
typedef struct harmonaize_receipt_t {
    // Number of the operation on its communicator, from 0; of a send or a receive, that of the message between the two ranks.
    uint64_t operation;
    // Tensor bytes that this rank's host sent.
    uint64_t wire_bytes;
    // Bits on the wire per element; 0 where nothing was sent.
    double bits_per_element;
    // Error (vNMSE) that the sum has at most; 0 where nothing was compressed.
    float error;
    // Error (vNMSE) that encoders measured.
    float measured_error;
    // Of a send or a receive: the rank at the other end. Else `HARMONAIZE_NO_RANK`.
    uint32_t peer;
    // Which kind of algorithm ran: `HARMONAIZE_ALGORITHM_...`, or a number that this version has no name for.
    uint32_t algorithm;
    // 1 where part of it was run another way than planned, else 0.
    uint32_t fallback;
    // In which codec the tensor travelled, such as "exact".
    char codec[HARMONAIZE_CODEC_BYTES];
} harmonaize_receipt_t;

// A tensor to protect.
typedef struct harmonaize_named_tensor_t {
    // Its name, which no other of this rank has.
    const char *name;
    // The tensor, of any type but `HARMONAIZE_COMPLEX128`.
    const struct harmonaize_tensor_t *tensor;
} harmonaize_named_tensor_t;

// How to protect. What is 0 or NULL is as usual.
typedef struct harmonaize_protect_options_t {
    // `sizeof` of this structure.
    size_t size;
    // The failure domain: ranks that say the same are lost together. As usual it is this machine. Virtual machines on one host
    // have one each; name their host, rack or zone here.
    const uint64_t *domain;
    // Nanoseconds to wait for the other ranks to call; 60 s as usual.
    uint64_t timeout_ns;
    // How many other ranks store this rank's state, the same at all ranks; 1 as usual.
    uint32_t replicas;
} harmonaize_protect_options_t;

// A tensor of a state that was restored.
typedef struct harmonaize_restored_tensor_t {
    // Its name. The text is the handle's, and there until that is freed.
    const char *name;
    // How many elements it has.
    uint64_t elements;
    // Of which type.
    harmonaize_dtype_t dtype;
} harmonaize_restored_tensor_t;

// Where a reader stands in its tenant's feed of events.
typedef struct harmonaize_cursor_t {
    // The feed.
    uint64_t feed;
    // The next event's number.
    uint64_t next;
} harmonaize_cursor_t;

// Something that the provider tells a tenant.
typedef struct harmonaize_event_t {
    // Its number in the tenant's feed, from 0, without gaps.
    uint64_t number;
    // Since when, in nanoseconds since 1970.
    uint64_t since_ns;
    // The communicator, by its name.
    const char *communicator;
    // What it says: `HARMONAIZE_EVENT_...`. The fields that its comment does not name are 0 or NULL.
    uint32_t kind;
    // How much is lost: `HARMONAIZE_LEVEL_...`.
    uint32_t level;
    // Ranks of the communicator, ascending.
    const uint32_t *ranks;
    // How many those are.
    size_t rank_count;
    // A time in nanoseconds since 1970.
    uint64_t at_ns;
    // How many processes wait.
    uint32_t waiting;
    // The sum of `HARMONAIZE_CLAUSE_...`.
    uint32_t clauses;
} harmonaize_event_t;

// A collective, where a target names one.
typedef uint32_t harmonaize_collective_t;

// So many bytes are through within so long, in 99 of 100 cases.
typedef struct harmonaize_target_t {
    // At most so many; 0: there is no target. Of a Barrier 1 will do.
    uint64_t bytes;
    // Within so many nanoseconds, from the last rank's call.
    uint64_t p99_ns;
    // Of what.
    harmonaize_collective_t collective;
} harmonaize_target_t;

// What a tenant wants of one communicator: intent, no mechanism. What is 0 is the provider's choice.
typedef struct harmonaize_constraints_t {
    // `sizeof` of this structure.
    size_t size;
    // What may be lost of its tensors, as text as when joining; empty: what its ranks said then.
    char budget[HARMONAIZE_BUDGET_BYTES];
    // Targets for single operations.
    struct harmonaize_target_t completions[HARMONAIZE_TARGETS];
    // A target for all operations of one iteration together.
    struct harmonaize_target_t iteration;
    // Least bus bandwidth of operations of 1 MiB and more, bytes a second.
    uint64_t min_busbw;
    // How long its place is kept for its members to regroup, in nanoseconds.
    uint64_t regroup_within_ns;
    // How much it matters beside others: `HARMONAIZE_PRIORITY_...`.
    uint32_t priority;
    // Its share relative to others', 1 to 64; 0 is 1.
    uint32_t weight;
    // What becomes of it when it fails: `HARMONAIZE_ON_FAILURE_...`.
    uint32_t on_failure;
    // 1: no aggregator sums its operations.
    uint32_t no_aggregation;
    // 1: its sums of floats have the same bits in every run.
    uint32_t ordered;
} harmonaize_constraints_t;

// What the provider has promised for one communicator, and how it was kept.
typedef struct harmonaize_agreement_t {
    // Counts the communicator's agreements from 1; 0 where nothing was ever agreed on.
    uint64_t number;
    // Since when, in nanoseconds since 1970.
    uint64_t since_ns;
    // Operations that were looked at.
    uint64_t operations;
    // Those that took longer than a target lets them.
    uint64_t late;
    // Bus bandwidth of the latest ones of 1 MiB and more, bytes a second.
    uint64_t busbw;
    // How often a clause ceased to be kept.
    uint64_t breaches;
    // What is not kept now: the sum of `HARMONAIZE_CLAUSE_...`.
    uint32_t broken;
} harmonaize_agreement_t;

// What a tenant leaves to the provider for its next iteration. What is 0 is as usual.
typedef struct harmonaize_knobs_t {
    // `sizeof` of this structure.
    size_t size;
    // The state is saved at least once in so many nanoseconds; as usual the provider does not choose when.
    uint64_t checkpoint_every_ns;
    // Nanoseconds that saving takes.
    uint64_t checkpoint_cost_ns;
    // Nanoseconds since it was last saved.
    uint64_t checkpoint_last_ns;
    // How much it matters that little is lost, and so how early it is saved: `HARMONAIZE_PRIORITY_...`.
    uint32_t checkpoint_importance;
    // Fewest micro-batches of which gradients are added up locally before they are exchanged; 1 as usual.
    uint32_t least_accumulate;
    // Most of them; as many as the fewest, as usual.
    uint32_t most_accumulate;
} harmonaize_knobs_t;

// What the provider chose for an iteration.
typedef struct harmonaize_choice_t {
    // `sizeof` of this structure.
    size_t size;
    // Micro-batches, within the range.
    uint32_t accumulate;
    // 1: save the state before this iteration.
    uint32_t checkpoint;
    // Why, of whichever differs from the usual; of the checkpoint where both do: `HARMONAIZE_CHOICE_...`.
    uint32_t reason;
} harmonaize_choice_t;

// Done.
#define HARMONAIZE_OK 0

// `harmonaize_test`, `harmonaize_seal`, `harmonaize_begin_seal`: what was begun before is in flight. No error.
#define HARMONAIZE_IN_PROGRESS 1

// NULL where something is needed, or a value that means nothing.
#define HARMONAIZE_ERROR_INVALID_ARGUMENT 2

// A bug of this library. The message of the panic is on standard error.
#define HARMONAIZE_ERROR_BUG 3

// An error for which this library has no status; its text says what.
#define HARMONAIZE_ERROR_OTHER 4

// Nobody answers where the agent should be.
#define HARMONAIZE_ERROR_CONNECT 5

// The agent refused the attachment.
#define HARMONAIZE_ERROR_REFUSED 6

// This library was built without RDMA.
#define HARMONAIZE_ERROR_NO_RDMA 7

// The agent broke the protocol, or is of another version.
#define HARMONAIZE_ERROR_PROTOCOL 8

// The agent died or closed the attachment. Attach again and join again.
#define HARMONAIZE_ERROR_AGENT_LOST 9

// The provider has ended the attachment.
#define HARMONAIZE_ERROR_DETACHED 10

// This process was forked from the one that attached. Attach in this one.
#define HARMONAIZE_ERROR_FORKED 11

// The kernel refused something.
#define HARMONAIZE_ERROR_SYSTEM 12

// Memory that cannot be had or reached.
#define HARMONAIZE_ERROR_MEMORY 13

// The arena has no room.
#define HARMONAIZE_ERROR_NO_ROOM 14

// Memory was not added to the attachment, or not let go.
#define HARMONAIZE_ERROR_REGION 15

// A tensor of another element type than is needed.
#define HARMONAIZE_ERROR_DTYPE 16

// Elements of this type are not so reduced.
#define HARMONAIZE_ERROR_REDUCTION 17

// Tensors, counts or ranks that do not fit the operation.
#define HARMONAIZE_ERROR_SHAPE 18

// Handles of several attachments in one call.
#define HARMONAIZE_ERROR_FOREIGN 19

// An operation in flight uses it, or another thread waits for it.
#define HARMONAIZE_ERROR_IN_USE 20

// As many operations as the rings hold are in flight or not yet waited for.
#define HARMONAIZE_ERROR_TOO_MANY 21

// Joining failed: `reason` of the error says why, `ranks` who is concerned.
#define HARMONAIZE_ERROR_JOIN 22

// A communicator does not go on with other ranks: `reason` and `ranks` as of a join.
#define HARMONAIZE_ERROR_REGROUP 23

// A communicator does not split: `reason` and `ranks` as of a join.
#define HARMONAIZE_ERROR_SPLIT 24

// A budget was not taken.
#define HARMONAIZE_ERROR_BUDGET 25

// Events cannot be read.
#define HARMONAIZE_ERROR_EVENTS 26

// Nothing came of a proposal or a question: no such communicator, or the provider cannot be asked now.
#define HARMONAIZE_ERROR_AGREEMENT 27

// A proposal was refused, and what could be had instead is not known. What was agreed on before still is.
#define HARMONAIZE_ERROR_NOT_AGREED 28

// A proposal was refused, and there is a counter-offer. What was agreed on before still is.
#define HARMONAIZE_ERROR_COUNTER_OFFER 29

// The tenant has asked the provider too much lately: `retry_after_ns` of the error says when it may again.
#define HARMONAIZE_ERROR_TOO_OFTEN 30

// Waiting took too long. What was waited for is still in flight and can be waited for again.
#define HARMONAIZE_ERROR_WAIT_TIMEOUT 31

// The operation's group has not ended, so it was not called.
#define HARMONAIZE_ERROR_GROUP_OPEN 32

// The group of this call has ended.
#define HARMONAIZE_ERROR_GROUP_ENDED 33

// The environment does not say what was looked for there: the agent's socket, or this process's rank.
#define HARMONAIZE_ERROR_ENVIRONMENT 34

// State is not protected: the ranks are in fewer failure domains than replicas need.
#define HARMONAIZE_ERROR_TOO_FEW_DOMAINS 35

// Nothing to restore or to write: no step was sealed by all ranks.
#define HARMONAIZE_ERROR_NOTHING_SEALED 36

// Nobody that is left has the states of these `ranks`, as they were when they were protected.
#define HARMONAIZE_ERROR_TOO_MANY_LOST 37

// Ranks protect, seal or restore with values that differ, or steps do not ascend.
#define HARMONAIZE_ERROR_DIFFER 38

// Others cannot go on: `ranks`, which have errors of their own.
#define HARMONAIZE_ERROR_PEERS 39

// A state that another rank sent cannot be read.
#define HARMONAIZE_ERROR_DAMAGED 40

// A file was not written.
#define HARMONAIZE_ERROR_FILE 41

// The agent does not speak this version of descriptors. This and all that follow are 64 more than the agent's status.
#define HARMONAIZE_ERROR_BAD_VERSION 65

// The agent knows no such collective, element type, reduction or flag.
#define HARMONAIZE_ERROR_BAD_KIND 66

// No such communicator on this attachment.
#define HARMONAIZE_ERROR_BAD_COMMUNICATOR 67

// A rank outside the communicator.
#define HARMONAIZE_ERROR_BAD_RANK 68

// A range outside a tensor or the arena.
#define HARMONAIZE_ERROR_OUT_OF_RANGE 69

// Input and output overlap without being the same.
#define HARMONAIZE_ERROR_OVERLAP 70

// Too many operations in flight at the agent.
#define HARMONAIZE_ERROR_BUSY 71

// Ranks called different operations; the text says who called what. The communicator has ended.
#define HARMONAIZE_ERROR_MISMATCH 72

// Some ranks did not call in time: `ranks`. The communicator has ended.
#define HARMONAIZE_ERROR_TIMEOUT 73

// A rank's process or host was lost: `ranks`. The communicator has ended.
#define HARMONAIZE_ERROR_RANK_LOST 74

// The communicator was destroyed with the operation in flight.
#define HARMONAIZE_ERROR_DESTROYED 75

// The provider ended the communicator.
#define HARMONAIZE_ERROR_DISSOLVED 76

// A bug or broken invariant in the agent; the communicator has ended.
#define HARMONAIZE_ERROR_INTERNAL 77

// A rank aborted the communicator: `ranks` names it.
#define HARMONAIZE_ERROR_ABORTED 78

// A time-out of operations that is longer than the operator allows.
#define HARMONAIZE_ERROR_TIMEOUT_TOO_LONG 79

// 8-bit signed integer.
#define HARMONAIZE_I8 0

// 8-bit unsigned integer.
#define HARMONAIZE_U8 1

// 32-bit signed integer.
#define HARMONAIZE_I32 2

// 32-bit unsigned integer.
#define HARMONAIZE_U32 3

// 64-bit signed integer.
#define HARMONAIZE_I64 4

// 64-bit unsigned integer.
#define HARMONAIZE_U64 5

// IEEE 754 binary16.
#define HARMONAIZE_F16 6

// bfloat16.
#define HARMONAIZE_BF16 7

// IEEE 754 binary32.
#define HARMONAIZE_F32 8

// IEEE 754 binary64.
#define HARMONAIZE_F64 9

// 16-bit signed integer.
#define HARMONAIZE_I16 10

// 16-bit unsigned integer.
#define HARMONAIZE_U16 11

// A byte that is false where it is 0, else true.
#define HARMONAIZE_BOOL 12

// A real and an imaginary part, each of IEEE 754 binary32.
#define HARMONAIZE_COMPLEX64 13

// A real and an imaginary part, each of IEEE 754 binary64.
#define HARMONAIZE_COMPLEX128 14

// The 8-bit float E4M3 of the Open Compute Project (e4m3fn).
#define HARMONAIZE_F8E4M3 15

// The 8-bit float E5M2 of the Open Compute Project.
#define HARMONAIZE_F8E5M2 16

// Sum.
#define HARMONAIZE_SUM 0

// Product.
#define HARMONAIZE_PRODUCT 1

// Smallest.
#define HARMONAIZE_MIN 2

// Largest.
#define HARMONAIZE_MAX 3

// Sum divided by the number of ranks.
#define HARMONAIZE_AVERAGE 4

// Bitwise and; of bools the conjunction.
#define HARMONAIZE_BAND 5

// Bitwise or; of bools the disjunction.
#define HARMONAIZE_BOR 6

// Bitwise exclusive or; of bools whether an odd number is true.
#define HARMONAIZE_BXOR 7

// Sum of all ranks' inputs, each times its rank's own factor (`harmonaize_with`).
#define HARMONAIZE_PREMUL_SUM 8

// AllReduce.
#define HARMONAIZE_ALL_REDUCE 0

// AllToAll.
#define HARMONAIZE_ALL_TO_ALL 1

// Broadcast.
#define HARMONAIZE_BROADCAST 2

// Barrier.
#define HARMONAIZE_BARRIER 3

// AllGather.
#define HARMONAIZE_ALL_GATHER 4

// ReduceScatter.
#define HARMONAIZE_REDUCE_SCATTER 5

// Reduce.
#define HARMONAIZE_REDUCE 6

// Gather.
#define HARMONAIZE_GATHER 7

// Scatter.
#define HARMONAIZE_SCATTER 8

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// A short text of a status; never NULL. What went wrong in particular is in `harmonaize_last_error`.
const char *harmonaize_status_text(harmonaize_status_t status);

// The version of this library, such as "0.1.0"; never NULL.
const char *harmonaize_version(void);

// The last failure of the calling thread; NULL where no call of it has failed. Valid until the thread's next call that
// fails, or its end.
const struct harmonaize_error_t *harmonaize_last_error(void);

// Attaches to the agent through its socket. Without a path the environment names it: `HARMONAIZE_SOCKET`. Without options
// everything is as usual. Blocks until the agent has answered.
harmonaize_status_t harmonaize_attach(const char *socket,
                                      const struct harmonaize_attach_options_t *options,
                                      struct harmonaize_client_t **client);

// Says which rank a launcher has made this process, of how many: torchrun, Open MPI, MPICH, Intel MPI or Slurm, by the
// variables that they set.
harmonaize_status_t harmonaize_place(uint32_t *rank,
                                     uint32_t *ranks);

// Makes the arena larger by at least so many bytes, so that tensors that come find room without waiting for the agent.
harmonaize_status_t harmonaize_grow(const struct harmonaize_client_t *client,
                                    uint64_t bytes);

// Says how many bytes the arena has, with what it has grown by.
harmonaize_status_t harmonaize_arena_bytes(const struct harmonaize_client_t *client,
                                           uint64_t *bytes);

// Frees a client. The attachment lasts as long as anything that came of it, tensors and regions apart. NULL does nothing.
void harmonaize_client_free(struct harmonaize_client_t *client);

// Makes a tensor in the arena, which grows if it must and may. Its contents are unspecified, its first byte is aligned to 64.
harmonaize_status_t harmonaize_tensor_create(const struct harmonaize_client_t *client,
                                             harmonaize_dtype_t dtype,
                                             uint64_t elements,
                                             struct harmonaize_tensor_t **tensor);

// Makes a part of a tensor: so many elements from `first` on. It shares the tensor's memory and is used wherever a tensor is.
harmonaize_status_t harmonaize_tensor_slice(const struct harmonaize_tensor_t *tensor,
                                            uint64_t first,
                                            uint64_t elements,
                                            struct harmonaize_tensor_t **slice);

// Says where a tensor's bytes are in this process. They are there until the tensor and all its slices are freed. While an
// operation on it is in flight, what is read and written there is torn.
harmonaize_status_t harmonaize_tensor_data(const struct harmonaize_tensor_t *tensor,
                                           void **data);

// Says how many elements a tensor has.
harmonaize_status_t harmonaize_tensor_elements(const struct harmonaize_tensor_t *tensor,
                                               uint64_t *elements);

// Says how many bytes a tensor has.
harmonaize_status_t harmonaize_tensor_bytes(const struct harmonaize_tensor_t *tensor,
                                            uint64_t *bytes);

// Says of which type a tensor's elements are.
harmonaize_status_t harmonaize_tensor_dtype(const struct harmonaize_tensor_t *tensor,
                                            harmonaize_dtype_t *dtype);

// Copies bytes into a tensor, from byte `offset` of it on.
harmonaize_status_t harmonaize_tensor_write(const struct harmonaize_tensor_t *tensor,
                                            uint64_t offset,
                                            const void *from,
                                            size_t bytes);

// Copies bytes out of a tensor, from byte `offset` of it on.
harmonaize_status_t harmonaize_tensor_read(const struct harmonaize_tensor_t *tensor,
                                           uint64_t offset,
                                           void *into,
                                           size_t bytes);

// Frees a tensor. An operation in flight on it goes on, and its memory stays taken until then. NULL does nothing.
void harmonaize_tensor_free(struct harmonaize_tensor_t *tensor);

// Has the agent map a range of the process's own memfd, in bytes of the file, so that tensors on it need no copy. The memfd
// has the seal `F_SEAL_SHRINK`, none against writing, and usual pages; the range begins and ends at multiples of a page. The
// descriptor may be closed afterwards.
harmonaize_status_t harmonaize_register(const struct harmonaize_client_t *client,
                                        int memfd,
                                        uint64_t offset,
                                        uint64_t bytes,
                                        struct harmonaize_region_t **region);

// Makes a tensor of so many elements on the bytes of a region from `offset` on, with whatever they hold. The offset is a
// multiple of an element's bytes; kernels are fastest where it is one of 64.
harmonaize_status_t harmonaize_region_tensor(const struct harmonaize_region_t *region,
                                             harmonaize_dtype_t dtype,
                                             uint64_t offset,
                                             uint64_t elements,
                                             struct harmonaize_tensor_t **tensor);

// Has the agent let go of a region, and waits until it has. Where tensors on it are left it is refused, and let go once
// those are freed. The handle makes no tensors any more, and is still to be freed.
harmonaize_status_t harmonaize_region_unregister(const struct harmonaize_region_t *region);

// Frees a region. NULL does nothing.
void harmonaize_region_free(struct harmonaize_region_t *region);

// Becomes `rank` of the communicator `name`, of `ranks` ranks. Without options everything is as usual. Blocks until all
// have come, or fails after the time-out with the ranks that never came.
harmonaize_status_t harmonaize_join(const struct harmonaize_client_t *client,
                                    const char *name,
                                    uint32_t rank,
                                    uint32_t ranks,
                                    const struct harmonaize_join_options_t *options,
                                    struct harmonaize_communicator_t **communicator);

// Becomes a rank of the communicator `name` that runs already: blocks until its members regroup.
harmonaize_status_t harmonaize_enter(const struct harmonaize_client_t *client,
                                     const char *name,
                                     const struct harmonaize_regroup_options_t *options,
                                     struct harmonaize_communicator_t **communicator);

// Goes on without ranks that are gone, and with processes that wait to be taken in, as a new communicator of the same name.
// Every member that stays calls it, at the same place in the order of operations. The one before is to be freed then.
harmonaize_status_t harmonaize_regroup(const struct harmonaize_communicator_t *communicator,
                                       const struct harmonaize_regroup_options_t *options,
                                       struct harmonaize_communicator_t **regrouped);

// Splits a communicator, which goes on: ranks that name the same color become one of their own, ordered by `key` and then by
// their ranks here. Every rank calls it, at the same place in the order of its splits. With `HARMONAIZE_NO_COLOR` the answer
// is `HARMONAIZE_OK` and the result NULL. Blocks until all have called, or fails after the least time-out.
harmonaize_status_t harmonaize_split(const struct harmonaize_communicator_t *communicator,
                                     uint32_t color,
                                     uint32_t key,
                                     uint64_t timeout_ns,
                                     struct harmonaize_communicator_t **part);

// Makes a handle of the same membership whose operations have these options. It is freed as any other.
harmonaize_status_t harmonaize_with(const struct harmonaize_communicator_t *communicator,
                                    const struct harmonaize_operation_options_t *options,
                                    struct harmonaize_communicator_t **with);

// Makes a handle of the same membership whose calls go into a group. It is freed as any other.
harmonaize_status_t harmonaize_grouped(const struct harmonaize_communicator_t *communicator,
                                       const struct harmonaize_group_t *group,
                                       struct harmonaize_communicator_t **grouped);

// Says which rank this process is.
harmonaize_status_t harmonaize_rank(const struct harmonaize_communicator_t *communicator,
                                    uint32_t *rank);

// Says how many ranks there are.
harmonaize_status_t harmonaize_ranks(const struct harmonaize_communicator_t *communicator,
                                     uint32_t *ranks);

// Says what it is called in calls and events that name a communicator. The text is the handle's, and there until that is freed.
harmonaize_status_t harmonaize_name(const struct harmonaize_communicator_t *communicator,
                                    const char **name);

// Says, of a communicator that goes on from another, which rank a rank was there; `HARMONAIZE_NO_RANK` of a newcomer, and where
// it does not go on from another.
harmonaize_status_t harmonaize_rank_before(const struct harmonaize_communicator_t *communicator,
                                           uint32_t rank,
                                           uint32_t *before);

// Wants another budget from now on, as text as when joining. It is in effect once all ranks have asked for the same.
harmonaize_status_t harmonaize_set_budget(const struct harmonaize_communicator_t *communicator,
                                          const char *budget);

// Ends a communicator at all ranks, from any thread. Whoever waits for one of its operations has `HARMONAIZE_ERROR_ABORTED` at
// once in this process, and within a second in others.
harmonaize_status_t harmonaize_abort(const struct harmonaize_communicator_t *communicator);

// Frees a communicator, which may leave it. NULL does nothing.
void harmonaize_communicator_free(struct harmonaize_communicator_t *communicator);

// Starts an AllReduce: `output` becomes the reduction of all ranks' `input`. Both of the same type and size; in place where
// they are the same handle.
harmonaize_status_t harmonaize_all_reduce(const struct harmonaize_communicator_t *communicator,
                                          const struct harmonaize_tensor_t *input,
                                          const struct harmonaize_tensor_t *output,
                                          harmonaize_reduce_t reduce,
                                          struct harmonaize_operation_t **operation);

// Starts an AllReduce of f32 with error feedback: what fewer bits leave out of this sum is added to the next one with this
// feedback.
harmonaize_status_t harmonaize_all_reduce_with_feedback(const struct harmonaize_communicator_t *communicator,
                                                        const struct harmonaize_tensor_t *input,
                                                        const struct harmonaize_tensor_t *output,
                                                        harmonaize_reduce_t reduce,
                                                        const struct harmonaize_feedback_t *feedback,
                                                        struct harmonaize_operation_t **operation);

// Starts a ReduceScatter: `output` becomes the reduction of all ranks' block of `input` with this rank's number. In place,
// where they are the same handle, the result is that block, and the others stay as they are.
harmonaize_status_t harmonaize_reduce_scatter(const struct harmonaize_communicator_t *communicator,
                                              const struct harmonaize_tensor_t *input,
                                              const struct harmonaize_tensor_t *output,
                                              harmonaize_reduce_t reduce,
                                              struct harmonaize_operation_t **operation);

// Starts an AllGather: block `r` of every rank's `output` becomes rank `r`'s `input`. In place, where they are the same
// handle, this rank's input is the block with its number.
harmonaize_status_t harmonaize_all_gather(const struct harmonaize_communicator_t *communicator,
                                          const struct harmonaize_tensor_t *input,
                                          const struct harmonaize_tensor_t *output,
                                          struct harmonaize_operation_t **operation);

// Starts an AllToAll: block `r` of `input` goes to rank `r`, and block `r` of `output` comes from rank `r`. Never in place.
harmonaize_status_t harmonaize_all_to_all(const struct harmonaize_communicator_t *communicator,
                                          const struct harmonaize_tensor_t *input,
                                          const struct harmonaize_tensor_t *output,
                                          struct harmonaize_operation_t **operation);

// Starts a Broadcast: every rank's `output` becomes the root's `input`. Only the root needs an input; in place where they are
// the same handle.
harmonaize_status_t harmonaize_broadcast(const struct harmonaize_communicator_t *communicator,
                                         const struct harmonaize_tensor_t *input,
                                         const struct harmonaize_tensor_t *output,
                                         uint32_t root,
                                         struct harmonaize_operation_t **operation);

// Starts a Reduce: the root's `output` becomes the reduction of all ranks' `input`. Only the root needs an output; in place
// where they are the same handle.
harmonaize_status_t harmonaize_reduce(const struct harmonaize_communicator_t *communicator,
                                      const struct harmonaize_tensor_t *input,
                                      const struct harmonaize_tensor_t *output,
                                      harmonaize_reduce_t reduce,
                                      uint32_t root,
                                      struct harmonaize_operation_t **operation);

// Starts a Gather: block `r` of the root's `output` becomes rank `r`'s `input`. Only the root needs an output. In place, where
// they are the same handle, the root's input is the block with its number.
harmonaize_status_t harmonaize_gather(const struct harmonaize_communicator_t *communicator,
                                      const struct harmonaize_tensor_t *input,
                                      const struct harmonaize_tensor_t *output,
                                      uint32_t root,
                                      struct harmonaize_operation_t **operation);

// Starts a Scatter: rank `r`'s `output` becomes block `r` of the root's `input`. Only the root needs an input. In place, where
// they are the same handle, the root's output is the block with its number, and stays as it is.
harmonaize_status_t harmonaize_scatter(const struct harmonaize_communicator_t *communicator,
                                       const struct harmonaize_tensor_t *input,
                                       const struct harmonaize_tensor_t *output,
                                       uint32_t root,
                                       struct harmonaize_operation_t **operation);

// Starts an AllGather whose inputs differ in size: rank `r`'s has `counts[r]` elements, perhaps none. There is a count for each
// rank, and all ranks give the same. In place where `input` is the slice of `output` that is its own.
harmonaize_status_t harmonaize_all_gather_v(const struct harmonaize_communicator_t *communicator,
                                            const struct harmonaize_tensor_t *input,
                                            const struct harmonaize_tensor_t *output,
                                            const uint64_t *counts,
                                            size_t count,
                                            struct harmonaize_operation_t **operation);

// Starts a ReduceScatter whose blocks differ in size: `output` becomes the reduction of all ranks' block of `input` with this
// rank's number. Counts and place as of `harmonaize_all_gather_v`.
harmonaize_status_t harmonaize_reduce_scatter_v(const struct harmonaize_communicator_t *communicator,
                                                const struct harmonaize_tensor_t *input,
                                                const struct harmonaize_tensor_t *output,
                                                harmonaize_reduce_t reduce,
                                                const uint64_t *counts,
                                                size_t count,
                                                struct harmonaize_operation_t **operation);

// Starts a Gather whose inputs differ in size; only the root needs an output. Counts and place as of `harmonaize_all_gather_v`.
harmonaize_status_t harmonaize_gather_v(const struct harmonaize_communicator_t *communicator,
                                        const struct harmonaize_tensor_t *input,
                                        const struct harmonaize_tensor_t *output,
                                        const uint64_t *counts,
                                        size_t count,
                                        uint32_t root,
                                        struct harmonaize_operation_t **operation);

// Starts a Scatter whose blocks differ in size; only the root needs an input. Counts and place as of
// `harmonaize_all_gather_v`.
harmonaize_status_t harmonaize_scatter_v(const struct harmonaize_communicator_t *communicator,
                                         const struct harmonaize_tensor_t *input,
                                         const struct harmonaize_tensor_t *output,
                                         const uint64_t *counts,
                                         size_t count,
                                         uint32_t root,
                                         struct harmonaize_operation_t **operation);

// Starts an AllToAll whose blocks differ in size: `send_counts[r]` elements of `input` go to rank `r`, and `recv_counts[r]` of
// `output` come from rank `r`. `most` is at least the largest count of any pair of ranks, and the same at all ranks.
harmonaize_status_t harmonaize_all_to_all_v(const struct harmonaize_communicator_t *communicator,
                                            const struct harmonaize_tensor_t *input,
                                            const uint64_t *send_counts,
                                            const struct harmonaize_tensor_t *output,
                                            const uint64_t *recv_counts,
                                            size_t count,
                                            uint64_t most,
                                            struct harmonaize_operation_t **operation);

// Starts a Barrier: ends when every rank has started it.
harmonaize_status_t harmonaize_barrier(const struct harmonaize_communicator_t *communicator,
                                       struct harmonaize_operation_t **operation);

// Starts to send `message` to a rank, which receives one of the same type and size. Sends and receives are in no order with
// collectives; of those from one rank to another the first send goes to the first receive.
harmonaize_status_t harmonaize_send(const struct harmonaize_communicator_t *communicator,
                                    const struct harmonaize_tensor_t *message,
                                    uint32_t to,
                                    struct harmonaize_operation_t **operation);

// Starts to receive what a rank sends: `message` becomes that.
harmonaize_status_t harmonaize_recv(const struct harmonaize_communicator_t *communicator,
                                    const struct harmonaize_tensor_t *message,
                                    uint32_t from,
                                    struct harmonaize_operation_t **operation);

// Starts to receive what any rank sends that no receive before this one is for. `peer` of the receipt names it.
harmonaize_status_t harmonaize_recv_any(const struct harmonaize_communicator_t *communicator,
                                        const struct harmonaize_tensor_t *message,
                                        struct harmonaize_operation_t **operation);

// Waits for an operation's end, at most so long. After `HARMONAIZE_ERROR_WAIT_TIMEOUT` it is still in flight and can be
// waited for again; after the end every call gives the same result. The receipt may be NULL.
harmonaize_status_t harmonaize_wait(const struct harmonaize_operation_t *operation,
                                    uint64_t timeout_ns,
                                    struct harmonaize_receipt_t *receipt);

// Says at once whether an operation has ended: `HARMONAIZE_OK` where it has succeeded, `HARMONAIZE_IN_PROGRESS` where it is in
// flight. The receipt may be NULL.
harmonaize_status_t harmonaize_test(const struct harmonaize_operation_t *operation,
                                    struct harmonaize_receipt_t *receipt);

// Waits until one of several operations of one attachment has ended, at most so long, and says which by its place. One that
// has ended before is found at once, so put NULL at its place, which is passed over. `harmonaize_wait` then gives its result.
harmonaize_status_t harmonaize_wait_any(struct harmonaize_operation_t *const *operations,
                                        size_t count,
                                        uint64_t timeout_ns,
                                        size_t *ended);

// Frees an operation. NULL does nothing.
void harmonaize_operation_free(struct harmonaize_operation_t *operation);

// Makes a descriptor that says when operations of this attachment have ended.
harmonaize_status_t harmonaize_completions_create(const struct harmonaize_client_t *client,
                                                  struct harmonaize_completions_t **completions);

// Says which descriptor it is. It is the library's: not to be closed, read or written.
harmonaize_status_t harmonaize_completions_descriptor(const struct harmonaize_completions_t *completions,
                                                      int *descriptor);

// Makes the descriptor unreadable until the next end. To be called before operations are tested: what ends in between makes it
// readable again.
harmonaize_status_t harmonaize_completions_clear(const struct harmonaize_completions_t *completions);

// Frees it, and closes the descriptor. NULL does nothing.
void harmonaize_completions_free(struct harmonaize_completions_t *completions);

// Makes error feedback for a tensor of so many f32, of which nothing is owed yet. Takes twice the tensor's bytes of the arena.
harmonaize_status_t harmonaize_feedback_create(const struct harmonaize_client_t *client,
                                               uint64_t elements,
                                               struct harmonaize_feedback_t **feedback);

// Copies out what is owed, from element `first` on: with it a checkpoint of the training is whole.
harmonaize_status_t harmonaize_feedback_read(const struct harmonaize_feedback_t *feedback,
                                             uint64_t first,
                                             float *into,
                                             size_t count);

// Sets what is owed, from element `first` on, as from a checkpoint.
harmonaize_status_t harmonaize_feedback_write(const struct harmonaize_feedback_t *feedback,
                                              uint64_t first,
                                              const float *from,
                                              size_t count);

// Forgets what is owed.
harmonaize_status_t harmonaize_feedback_reset(const struct harmonaize_feedback_t *feedback);

// Frees error feedback. NULL does nothing.
void harmonaize_feedback_free(struct harmonaize_feedback_t *feedback);

// Begins a group. Calls go into it on communicators that are `harmonaize_grouped`.
harmonaize_status_t harmonaize_group_begin(const struct harmonaize_client_t *client,
                                           struct harmonaize_group_t **group);

// Submits a group's calls, in their order. From now on their operations can be waited for. The handle is still to be freed.
harmonaize_status_t harmonaize_group_end(const struct harmonaize_group_t *group);

// Frees a group. NULL does nothing.
void harmonaize_group_free(struct harmonaize_group_t *group);

// Protects what these tensors hold at each step that is sealed: agents send snapshots of them to other ranks. Every rank calls
// it, at the same place in the order of its splits, with as many tensors as it likes. Takes one of the job's communicators,
// and `2 * (1 + replicas)` times the tensors' bytes of the arena. Blocks until all have called.
harmonaize_status_t harmonaize_protect(const struct harmonaize_communicator_t *communicator,
                                       const struct harmonaize_named_tensor_t *tensors,
                                       size_t count,
                                       const struct harmonaize_protect_options_t *options,
                                       struct harmonaize_protection_t **protection);

// Seals a step: copies the tensors, and begins to send the copy to the ranks that store replicas. All ranks call it, with the
// same step, larger than all before. The tensors may be written again when it returns. `HARMONAIZE_IN_PROGRESS`, at all ranks
// alike: the step is not sealed, since the copy or replicas of the one before are still on their way; nobody waits here.
// `HARMONAIZE_OK` also says that all ranks have the step before whole, with its replicas.
harmonaize_status_t harmonaize_seal(const struct harmonaize_protection_t *protection,
                                    uint64_t step);

// Begins to seal a step, as `harmonaize_seal`; the agent copies the tensors while the job computes. They may be read meanwhile, and
// written again once `harmonaize_end_seal` has returned. The agent has up to a quarter as many tensors in hand as the attachment
// has entries, two for each; those beyond are copied by `harmonaize_end_seal`. Where the attachment is not mapped, this call copies
// all.
harmonaize_status_t harmonaize_begin_seal(const struct harmonaize_protection_t *protection,
                                          uint64_t step);

// Waits until the tensors are copied that `harmonaize_begin_seal` has begun with, at most so long, and begins to send replicas.
// After `HARMONAIZE_ERROR_WAIT_TIMEOUT` the agent goes on: the tensors must not be written, and it can be waited for again.
// Without such a call before, it does nothing.
harmonaize_status_t harmonaize_end_seal(const struct harmonaize_protection_t *protection,
                                        uint64_t timeout_ns);

// Waits until the replicas of the last sealed step are at their ranks, and those that this rank stores are here, at most so
// long. After `HARMONAIZE_ERROR_WAIT_TIMEOUT` they go on and can be waited for again.
harmonaize_status_t harmonaize_protection_wait(const struct harmonaize_protection_t *protection,
                                               uint64_t timeout_ns);

// Says the newest step of which this rank knows that all have it whole, with its replicas; `HARMONAIZE_NO_STEP` where there is
// none. From then on a restore goes back no further, however ranks are lost in up to as many failure domains as replicas.
harmonaize_status_t harmonaize_committed(const struct harmonaize_protection_t *protection,
                                         uint64_t *step);

// Writes this rank's last sealed state to a file of safetensors, and says which step that is; `step` may be NULL. The file is
// on disk as a whole then, or was not touched. Tensors have one dimension there; the metadata has `rank` and `step`.
harmonaize_status_t harmonaize_write_safetensors(const struct harmonaize_protection_t *protection,
                                                 const char *path,
                                                 uint64_t *step);

// Goes back to the newest step that is whole of all ranks that were protected, those that are lost included: this rank's
// tensors are as they were then. The states of so many other ranks come beside, by their ranks of then. Every rank of `next`,
// which comes of `harmonaize_regroup`, calls it, or `harmonaize_restore_newcomer`. After an error of another rank that is
// lost, regroup and restore again. To seal further steps, protect on `next`.
harmonaize_status_t harmonaize_restore(const struct harmonaize_protection_t *protection,
                                       const struct harmonaize_communicator_t *next,
                                       const uint32_t *of,
                                       size_t count,
                                       struct harmonaize_restored_t **restored);

// Takes part in a restore as a newcomer, which has no state of its own, while the others call `harmonaize_restore`. The states
// of so many ranks come, by their ranks of then.
harmonaize_status_t harmonaize_restore_newcomer(const struct harmonaize_communicator_t *communicator,
                                                const uint32_t *of,
                                                size_t count,
                                                struct harmonaize_restored_t **restored);

// Frees a protection. What it has stored of others is gone with it. NULL does nothing.
void harmonaize_protection_free(struct harmonaize_protection_t *protection);

// Says which step all states are of.
harmonaize_status_t harmonaize_restored_step(const struct harmonaize_restored_t *restored,
                                             uint64_t *step);

// Says which ranks, as they were when they were protected, take no part any more, and how many. NULL where there are none. The
// array is the handle's, and there until that is freed.
harmonaize_status_t harmonaize_restored_lost(const struct harmonaize_restored_t *restored,
                                             const uint32_t **ranks,
                                             size_t *count);

// Says how many tensors a state has. States are counted from 0, in the order in which the restore named their ranks.
harmonaize_status_t harmonaize_restored_tensors(const struct harmonaize_restored_t *restored,
                                                size_t state,
                                                size_t *count);

// Gives name, type and size of a state's tensor. They are in the order of their names.
harmonaize_status_t harmonaize_restored_tensor(const struct harmonaize_restored_t *restored,
                                               size_t state,
                                               size_t index,
                                               struct harmonaize_restored_tensor_t *tensor);

// Copies a tensor of a state, by its name, into one of the same type and number of elements.
harmonaize_status_t harmonaize_restored_read(const struct harmonaize_restored_t *restored,
                                             size_t state,
                                             const char *name,
                                             const struct harmonaize_tensor_t *into);

// Writes a state to a file of safetensors, as `harmonaize_write_safetensors`.
harmonaize_status_t harmonaize_restored_write_safetensors(const struct harmonaize_restored_t *restored,
                                                          size_t state,
                                                          const char *path);

// Frees what came of a restore. NULL does nothing.
void harmonaize_restored_free(struct harmonaize_restored_t *restored);

// Makes a reader of events. It goes on from where another stood, maybe in another process; with NULL it begins with what
// happens after its first read.
harmonaize_status_t harmonaize_events_create(const struct harmonaize_client_t *client,
                                             const struct harmonaize_cursor_t *from,
                                             struct harmonaize_events_t **events);

// Reads the next events: returns as soon as there are some, or without any after so long. Says how many there are, to be had by
// `harmonaize_events_get`, and how many were missed because the reader came too late; `missed` may be NULL.
harmonaize_status_t harmonaize_events_read(const struct harmonaize_events_t *events,
                                           uint64_t wait_ns,
                                           size_t *count,
                                           uint64_t *missed);

// Gives one of the events of the last read. Its pointers are the reader's, and hold until it reads again or is freed.
harmonaize_status_t harmonaize_events_get(const struct harmonaize_events_t *events,
                                          size_t index,
                                          struct harmonaize_event_t *event);

// Says where a reader stands, so that a later one can go on there. Not before its first read has returned.
harmonaize_status_t harmonaize_events_cursor(const struct harmonaize_events_t *events,
                                             struct harmonaize_cursor_t *cursor);

// Frees a reader of events. NULL does nothing.
void harmonaize_events_free(struct harmonaize_events_t *events);

// Proposes what the provider shall promise for the tenant's communicator of this name. What is agreed on takes the place of
// what was before; constraints of zeros give everything back. `outcome` becomes what is agreed on, or after
// `HARMONAIZE_ERROR_COUNTER_OFFER` what could be had: to take that, propose it. Its size is to be set; it and `agreement` may be
// NULL. The error's text has the reasons.
harmonaize_status_t harmonaize_propose(const struct harmonaize_client_t *client,
                                       const char *communicator,
                                       const struct harmonaize_constraints_t *wanted,
                                       struct harmonaize_agreement_t *agreement,
                                       struct harmonaize_constraints_t *outcome);

// Says what the provider has promised for the communicator of this name, what of it is not kept now, and how it was kept. The
// size of `constraints` is to be set; it and `agreement` may be NULL.
harmonaize_status_t harmonaize_agreement(const struct harmonaize_client_t *client,
                                         const char *communicator,
                                         struct harmonaize_agreement_t *agreement,
                                         struct harmonaize_constraints_t *constraints);

// Says what the provider chooses for the next iteration of the job on the communicator of this name. One rank asks, and tells
// the others. Where the provider cannot be asked it is the least accumulation, and a checkpoint once one is due. Which
// iteration an operation belongs to is `iteration` of `harmonaize_operation_options_t`. The size of `choice` is to be set.
harmonaize_status_t harmonaize_iteration(const struct harmonaize_client_t *client,
                                         const char *communicator,
                                         const struct harmonaize_knobs_t *knobs,
                                         struct harmonaize_choice_t *choice);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* HARMONAIZE_H */
