/*
 * What the C library does, case by case: argv[1] names one, RANK and WORLD_SIZE say which rank this is, of how many.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <harmonaize.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND UINT64_C(1000000000)
#define STEP (20 * SECOND)
#define COUNT(array) (sizeof(array) / sizeof *(array))

static harmonaize_client_t *client;
static harmonaize_communicator_t *job;
static uint32_t rank, ranks;

static void fail(int line, const char *what) {
    const harmonaize_error_t *error = harmonaize_last_error();
    fprintf(stderr, "rank %u, line %d: %s; last error: %s\n", rank, line, what, error ? error->text : "none");
    exit(EXIT_FAILURE);
}

#define CHECK(holds) ((holds) ? (void)0 : fail(__LINE__, #holds))
#define OK(call) CHECK((call) == HARMONAIZE_OK)
/* A call that fails, with a text that contains a word. */
#define FAILS(call, code, word)                                                                                        \
    do {                                                                                                               \
        CHECK((call) == (code));                                                                                       \
        CHECK(harmonaize_last_error()->status == (code));                                                              \
        CHECK(strstr(harmonaize_last_error()->text, word));                                                            \
    } while (0)
#define INVALID(call, word) FAILS(call, HARMONAIZE_ERROR_INVALID_ARGUMENT, word)

static uint32_t number(const char *name) {
    const char *text = getenv(name);
    CHECK(text);
    return (uint32_t)strtoul(text, NULL, 10);
}

static void join(const char *name) {
    harmonaize_attach_options_t attach = {.size = sizeof attach, .arena_bytes = 1 << 20, .timeout_ns = STEP};
    harmonaize_join_options_t options = {
        .size = sizeof options, .job = "c", .budget = "exact", .timeout_ns = STEP, .operation_timeout_ns = STEP};
    rank = number("RANK");
    ranks = number("WORLD_SIZE");
    OK(harmonaize_attach(NULL, &attach, &client));
    OK(harmonaize_join(client, name, rank, ranks, &options, &job));
}

static void leave(void) {
    harmonaize_communicator_free(job);
    harmonaize_client_free(client);
}

/* A tensor of u64 with contents, and where they are. */
static harmonaize_tensor_t *tensor(uint64_t elements, const uint64_t *values, uint64_t **data) {
    harmonaize_tensor_t *made;
    void *bytes;
    OK(harmonaize_tensor_create(client, HARMONAIZE_U64, elements, &made));
    OK(harmonaize_tensor_data(made, &bytes));
    if (values)
        memcpy(bytes, values, elements * sizeof *values);
    *data = bytes;
    return made;
}

/* Waits for an operation and frees it. */
static void done(harmonaize_status_t started, harmonaize_operation_t *operation, int line) {
    if (started != HARMONAIZE_OK || harmonaize_wait(operation, STEP, NULL) != HARMONAIZE_OK)
        fail(line, "the operation failed");
    harmonaize_operation_free(operation);
}

#define DONE(call)                                                                                                     \
    do {                                                                                                               \
        harmonaize_status_t started = (call);                                                                          \
        done(started, operation, __LINE__);                                                                            \
    } while (0)

/* Every collective among two ranks, with blocks of one element. */
static void collectives(void) {
    join("collectives");
    CHECK(ranks == 2);
    harmonaize_operation_t *operation;
    uint64_t *a, *b, zero[2] = {0, 0}, mine[2] = {10 + rank, 20 + rank};
    harmonaize_tensor_t *two = tensor(2, mine, &a), *other = tensor(2, zero, &b), *own, *one;

    OK(harmonaize_tensor_slice(two, rank, 1, &own));
    OK(harmonaize_tensor_slice(other, 0, 1, &one));

    DONE(harmonaize_all_reduce(job, two, other, HARMONAIZE_SUM, &operation));
    CHECK(b[0] == 21 && b[1] == 41 && a[0] == mine[0]);
    DONE(harmonaize_all_reduce(job, two, two, HARMONAIZE_MAX, &operation));
    CHECK(a[0] == 11 && a[1] == 21);

    memcpy(a, mine, sizeof mine);
    DONE(harmonaize_reduce_scatter(job, two, one, HARMONAIZE_SUM, &operation));
    CHECK(b[0] == (rank ? 41 : 21));
    DONE(harmonaize_reduce_scatter(job, two, two, HARMONAIZE_SUM, &operation));
    CHECK(a[rank] == (rank ? 41 : 21) && a[!rank] == mine[!rank]);

    b[0] = 5 + rank;
    DONE(harmonaize_all_gather(job, one, two, &operation));
    CHECK(a[0] == 5 && a[1] == 6);
    a[!rank] = 0;
    DONE(harmonaize_all_gather(job, two, two, &operation));
    CHECK(a[0] == 5 && a[1] == 6);

    memcpy(a, mine, sizeof mine);
    DONE(harmonaize_all_to_all(job, two, other, &operation));
    CHECK(b[0] == (rank ? 20 : 10) && b[1] == (rank ? 21 : 11));

    DONE(harmonaize_broadcast(job, rank == 1 ? two : NULL, other, 1, &operation));
    CHECK(b[0] == 11 && b[1] == 21);
    DONE(harmonaize_broadcast(job, two, two, 0, &operation));
    CHECK(a[0] == 10 && a[1] == 20);

    DONE(harmonaize_reduce(job, two, rank == 1 ? other : NULL, HARMONAIZE_PRODUCT, 1, &operation));
    CHECK(rank == 0 || (b[0] == 100 && b[1] == 400));
    DONE(harmonaize_gather(job, own, rank == 0 ? other : NULL, 0, &operation));
    CHECK(rank == 1 || (b[0] == 10 && b[1] == 20));
    memcpy(a, mine, sizeof mine);
    DONE(rank == 0 ? harmonaize_gather(job, two, two, 0, &operation) : harmonaize_gather(job, own, own, 0, &operation));
    CHECK(rank == 1 || (a[0] == 10 && a[1] == 21));
    DONE(harmonaize_scatter(job, rank == 0 ? two : NULL, one, 0, &operation));
    CHECK(b[0] == (rank ? 21 : 10));
    DONE(rank == 1 ? harmonaize_scatter(job, two, two, 1, &operation) : harmonaize_scatter(job, one, one, 1, &operation));
    CHECK(rank == 1 || b[0] == 11);
    DONE(harmonaize_barrier(job, &operation));

    /* Blocks of 1 and 2 elements. */
    uint64_t counts[2] = {1, 2}, *c, *d, three[3] = {1, 2, 3};
    harmonaize_tensor_t *all = tensor(3, three, &c), *some = tensor(1 + rank, NULL, &d);
    for (uint32_t at = 0; at <= rank; at++)
        d[at] = 7 + rank + at;
    DONE(harmonaize_all_gather_v(job, some, all, counts, 2, &operation));
    CHECK(c[0] == 7 && c[1] == 8 && c[2] == 9);
    DONE(harmonaize_reduce_scatter_v(job, all, some, HARMONAIZE_SUM, counts, 2, &operation));
    CHECK(d[0] == (rank ? 16 : 14) && d[rank] == (rank ? 18 : 14));
    DONE(harmonaize_gather_v(job, some, rank == 1 ? all : NULL, counts, 2, 1, &operation));
    CHECK(rank == 0 || (c[0] == 14 && c[1] == 16 && c[2] == 18));
    DONE(harmonaize_scatter_v(job, rank == 1 ? all : NULL, some, counts, 2, 1, &operation));
    CHECK(d[0] == (rank ? 16 : 14));
    /* Rank 0 sends itself 1 and the other 2, which sends nothing. */
    uint64_t sent[2] = {1, 2}, received[2] = {1, 0}, *e, *f, nothing[2] = {0, 0}, two_of_0[2] = {2, 0};
    harmonaize_tensor_t *from = tensor(rank ? 0 : 3, three, &e), *to = tensor(rank ? 2 : 1, NULL, &f);
    DONE(rank ? harmonaize_all_to_all_v(job, from, nothing, to, two_of_0, 2, 2, &operation)
              : harmonaize_all_to_all_v(job, from, sent, to, received, 2, 2, &operation));
    CHECK(f[0] == (rank ? 2 : 1) && (rank == 0 || f[1] == 3));

    harmonaize_tensor_t *used[] = {two, other, own, one, all, some, from, to};
    for (size_t at = 0; at < COUNT(used); at++)
        harmonaize_tensor_free(used[at]);
    leave();
}

/* Messages, groups, options, waiting for one of several, the descriptor, split, own memory, floats with feedback. */
static void calls(void) {
    join("calls");
    uint64_t *a, *b, mine[2] = {1 + rank, 2 + rank}, zero[2] = {0, 0};
    harmonaize_tensor_t *sent = tensor(2, mine, &a), *received = tensor(2, zero, &b);
    harmonaize_receipt_t receipt;
    const char *name;
    uint32_t value;
    OK(harmonaize_rank(job, &value));
    CHECK(value == rank);
    OK(harmonaize_ranks(job, &value));
    CHECK(value == ranks);
    OK(harmonaize_name(job, &name));
    CHECK(strcmp(name, "c/calls") == 0);
    OK(harmonaize_rank_before(job, 0, &value));
    CHECK(value == HARMONAIZE_NO_RANK);
    uint64_t size;
    OK(harmonaize_tensor_bytes(sent, &size));
    CHECK(size == 16);
    OK(harmonaize_tensor_elements(sent, &size));
    CHECK(size == 2);
    OK(harmonaize_tensor_dtype(sent, &value));
    CHECK(value == HARMONAIZE_U64);
    uint64_t copy[2];
    OK(harmonaize_tensor_write(sent, 8, mine, 8));
    OK(harmonaize_tensor_read(sent, 0, copy, sizeof copy));
    CHECK(copy[0] == mine[0] && copy[1] == mine[0]);
    memcpy(a, mine, sizeof mine);

    /* To each other, in a group, and waited for as they end. */
    harmonaize_group_t *group;
    harmonaize_communicator_t *grouped;
    harmonaize_operation_t *both[3];
    OK(harmonaize_group_begin(client, &group));
    OK(harmonaize_grouped(job, group, &grouped));
    OK(harmonaize_send(grouped, sent, !rank, &both[0]));
    both[1] = NULL;
    OK(harmonaize_recv(grouped, received, !rank, &both[2]));
    FAILS(harmonaize_wait(both[0], 0, NULL), HARMONAIZE_ERROR_GROUP_OPEN, "group");
    OK(harmonaize_group_end(group));
    FAILS(harmonaize_group_end(group), HARMONAIZE_ERROR_GROUP_ENDED, "group");
    for (int left = 2; left; left--) {
        size_t ended;
        OK(harmonaize_wait_any(both, COUNT(both), STEP, &ended));
        CHECK(ended == 0 || ended == 2);
        OK(harmonaize_wait(both[ended], 0, &receipt));
        CHECK(receipt.peer == !rank && strcmp(receipt.codec, "exact") == 0);
        harmonaize_operation_free(both[ended]);
        both[ended] = NULL;
    }
    CHECK(b[0] == 1 + !rank);
    harmonaize_communicator_free(grouped);
    harmonaize_group_free(group);

    /* From whoever sends; tested when the descriptor says so. */
    harmonaize_completions_t *completions;
    harmonaize_operation_t *message, *operation;
    struct pollfd ready = {.events = POLLIN};
    OK(harmonaize_completions_create(client, &completions));
    OK(harmonaize_completions_descriptor(completions, &ready.fd));
    OK(rank ? harmonaize_recv_any(job, received, &message) : harmonaize_send(job, sent, 1, &message));
    harmonaize_status_t tested;
    while ((tested = harmonaize_test(message, &receipt)) == HARMONAIZE_IN_PROGRESS) {
        CHECK(poll(&ready, 1, 20000) == 1);
        OK(harmonaize_completions_clear(completions));
    }
    OK(tested);
    CHECK(receipt.peer == !rank);
    harmonaize_operation_free(message);
    harmonaize_completions_free(completions);

    /* A factor of each rank's own. */
    double factor = 1 + rank;
    harmonaize_operation_options_t options = {
        .size = sizeof options, .timeout_ns = STEP, .iteration = 7, .factor = &factor, .priority = 1};
    harmonaize_communicator_t *with;
    OK(harmonaize_with(job, &options, &with));
    DONE(harmonaize_all_reduce(with, sent, received, HARMONAIZE_PREMUL_SUM, &operation));
    CHECK(b[0] == 1 + 2 * 2);
    harmonaize_communicator_free(with);

    /* Rank 0 alone. */
    harmonaize_communicator_t *part;
    OK(harmonaize_split(job, rank ? HARMONAIZE_NO_COLOR : 3, rank, STEP, &part));
    CHECK(!part == !!rank);
    if (part) {
        OK(harmonaize_ranks(part, &value));
        CHECK(value == 1);
        DONE(harmonaize_all_reduce(part, sent, received, HARMONAIZE_SUM, &operation));
        CHECK(b[0] == 1);
    }
    harmonaize_communicator_free(part);

    /* Memory that the process has already. */
    int memfd = memfd_create("own", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    harmonaize_region_t *region;
    harmonaize_tensor_t *there, *beyond;
    CHECK(memfd >= 0 && ftruncate(memfd, 4096) == 0);
    FAILS(harmonaize_register(client, memfd, 0, 4096, &region), HARMONAIZE_ERROR_REGION, "F_SEAL_SHRINK");
    CHECK(fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK) == 0 && pwrite(memfd, mine, 16, 64) == 16);
    OK(harmonaize_register(client, memfd, 0, 4096, &region));
    OK(harmonaize_region_tensor(region, HARMONAIZE_U64, 64, 2, &there));
    DONE(harmonaize_all_reduce(job, there, there, HARMONAIZE_SUM, &operation));
    CHECK(pread(memfd, copy, 16, 64) == 16 && copy[0] == 3 && copy[1] == 5);
    FAILS(harmonaize_region_tensor(region, HARMONAIZE_U64, 4096, 2, &beyond), HARMONAIZE_ERROR_MEMORY, "4096");
    CHECK(!beyond);
    harmonaize_tensor_free(there);
    OK(harmonaize_region_unregister(region));
    FAILS(harmonaize_region_unregister(region), HARMONAIZE_ERROR_REGION, "no such region");
    harmonaize_region_free(region);
    close(memfd);

    /* Nothing is compressed, so nothing is owed. */
    float owed[4] = {1, 1, 1, 1};
    harmonaize_feedback_t *feedback;
    harmonaize_tensor_t *floats;
    void *data;
    OK(harmonaize_feedback_create(client, 4, &feedback));
    OK(harmonaize_tensor_create(client, HARMONAIZE_F32, 4, &floats));
    OK(harmonaize_tensor_data(floats, &data));
    memcpy(data, owed, sizeof owed);
    DONE(harmonaize_all_reduce_with_feedback(job, floats, floats, HARMONAIZE_SUM, feedback, &operation));
    CHECK(((float *)data)[3] == 2);
    OK(harmonaize_feedback_read(feedback, 0, owed, 4));
    CHECK(owed[0] == 0 && owed[3] == 0);
    owed[1] = 2;
    OK(harmonaize_feedback_write(feedback, 0, owed, 4));
    OK(harmonaize_feedback_reset(feedback));
    OK(harmonaize_feedback_read(feedback, 1, owed, 1));
    CHECK(owed[0] == 0);
    FAILS(harmonaize_feedback_read(feedback, 0, owed, 5), HARMONAIZE_ERROR_OUT_OF_RANGE, "4");
    harmonaize_feedback_free(feedback);
    harmonaize_tensor_free(floats);

    uint64_t arena, grown;
    OK(harmonaize_arena_bytes(client, &arena));
    OK(harmonaize_grow(client, 1 << 20));
    OK(harmonaize_arena_bytes(client, &grown));
    CHECK(grown >= arena + (1 << 20));
    OK(harmonaize_set_budget(job, "vnmse=0.01"));
    FAILS(harmonaize_set_budget(job, "vnmse=7"), HARMONAIZE_ERROR_BUDGET, "7");

    /* In any order. */
    harmonaize_client_free(client);
    harmonaize_communicator_free(job);
    harmonaize_tensor_free(sent);
    harmonaize_tensor_free(received);
}

/* Agreements and events, of rank 0. */
static void provider(void) {
    join("provider");
    harmonaize_operation_t *operation;
    harmonaize_agreement_t agreement;
    harmonaize_constraints_t wanted = {.size = sizeof wanted, .weight = 2, .priority = HARMONAIZE_PRIORITY_HIGH};
    harmonaize_constraints_t outcome = {.size = sizeof outcome};
    if (rank == 0) {
        harmonaize_events_t *events;
        harmonaize_cursor_t cursor;
        harmonaize_event_t event;
        size_t count = 7;
        uint64_t missed = 7;
        OK(harmonaize_events_create(client, NULL, &events));
        FAILS(harmonaize_events_cursor(events, &cursor), HARMONAIZE_ERROR_EVENTS, "nowhere");
        OK(harmonaize_events_read(events, 0, &count, &missed));
        CHECK(count == 0 && missed == 0);
        INVALID(harmonaize_events_get(events, 0, &event), "event 0 of 0");
        OK(harmonaize_events_cursor(events, &cursor));
        harmonaize_events_free(events);
        OK(harmonaize_events_create(client, &cursor, &events));
        OK(harmonaize_events_read(events, 0, &count, NULL));
        harmonaize_events_free(events);

        OK(harmonaize_propose(client, "c/provider", &wanted, &agreement, &outcome));
        CHECK(agreement.number == 1 && agreement.broken == 0);
        CHECK(outcome.size == sizeof outcome && outcome.weight == 2 && outcome.priority == HARMONAIZE_PRIORITY_HIGH);
        wanted.min_busbw = UINT64_C(900000000000);
        harmonaize_status_t refused = harmonaize_propose(client, "c/provider", &wanted, NULL, &outcome);
        CHECK(refused == HARMONAIZE_ERROR_COUNTER_OFFER && outcome.min_busbw < wanted.min_busbw);
        CHECK(strstr(harmonaize_last_error()->text, "not agreed on: "));
        OK(harmonaize_agreement(client, "c/provider", &agreement, &outcome));
        CHECK(agreement.number == 1 && outcome.min_busbw == 0 && outcome.weight == 2);
        FAILS(harmonaize_agreement(client, "nobody", NULL, NULL), HARMONAIZE_ERROR_AGREEMENT, "nobody");

        harmonaize_knobs_t knobs = {.size = sizeof knobs, .least_accumulate = 2, .most_accumulate = 8};
        harmonaize_choice_t choice = {.size = sizeof choice};
        OK(harmonaize_iteration(client, "c/provider", &knobs, &choice));
        CHECK(choice.size == sizeof choice && choice.accumulate >= 2 && choice.accumulate <= 8 && choice.checkpoint == 0);
        knobs.checkpoint_every_ns = 600 * SECOND;
        knobs.checkpoint_cost_ns = 5 * SECOND;
        knobs.checkpoint_last_ns = 700 * SECOND;
        OK(harmonaize_iteration(client, "c/provider", &knobs, &choice));
        CHECK(choice.checkpoint == 1 && choice.reason == HARMONAIZE_CHOICE_DUE);
        INVALID(harmonaize_iteration(client, "c/provider", &knobs, NULL), "choice");
        FAILS(harmonaize_iteration(client, "nobody", &knobs, &choice), HARMONAIZE_ERROR_AGREEMENT, "nobody");
        knobs.least_accumulate = 9;
        FAILS(harmonaize_iteration(client, "c/provider", &knobs, &choice), HARMONAIZE_ERROR_AGREEMENT, "9 to 8");
    }
    DONE(harmonaize_barrier(job, &operation));
    leave();
}

/* What makes no sense, at this rank alone: no other rank is waited for. */
static void wrong(void) {
    join("wrong");
    harmonaize_client_t *no_client;
    harmonaize_communicator_t *none;
    harmonaize_operation_t *operation;
    harmonaize_tensor_t *tensors[3], *no_tensor;
    uint64_t counts[3] = {1, 1, 1};
    OK(harmonaize_tensor_create(client, HARMONAIZE_U64, 3, &tensors[0]));
    OK(harmonaize_tensor_create(client, HARMONAIZE_F32, 3, &tensors[1]));
    OK(harmonaize_tensor_create(client, HARMONAIZE_U64, 4, &tensors[2]));

    INVALID(harmonaize_attach(NULL, NULL, NULL), "NULL");
    INVALID(harmonaize_attach("\xff", NULL, &no_client), "UTF-8");
    CHECK(!no_client);
    harmonaize_attach_options_t zero = {0}, access = {.size = sizeof access, .access = 9};
    INVALID(harmonaize_attach(NULL, &zero, &no_client), "sizeof");
    INVALID(harmonaize_attach(NULL, &access, &no_client), "9 is no access");
    access.access = HARMONAIZE_ACCESS_MAPPED;
    access.entries = 3;
    FAILS(harmonaize_attach(NULL, &access, &no_client), HARMONAIZE_ERROR_REFUSED, "3");
    INVALID(harmonaize_tensor_create(NULL, HARMONAIZE_U64, 3, &no_tensor), "client");
    INVALID(harmonaize_tensor_create(client, 17, 3, &no_tensor), "17 is no element type");
    INVALID(harmonaize_tensor_create(client, 256, 3, &no_tensor), "256 is no element type");
    FAILS(harmonaize_tensor_create(client, HARMONAIZE_U64, UINT64_MAX, &no_tensor), HARMONAIZE_ERROR_NO_ROOM, "room");
    FAILS(harmonaize_tensor_slice(tensors[0], 2, 2, &no_tensor), HARMONAIZE_ERROR_OUT_OF_RANGE, "3");
    FAILS(harmonaize_tensor_slice(tensors[0], 2, UINT64_MAX, &no_tensor), HARMONAIZE_ERROR_OUT_OF_RANGE, "3");
    FAILS(harmonaize_tensor_write(tensors[0], 17, counts, 8), HARMONAIZE_ERROR_OUT_OF_RANGE, "24");
    FAILS(harmonaize_tensor_read(tensors[0], UINT64_MAX, counts, 8), HARMONAIZE_ERROR_OUT_OF_RANGE, "24");
    INVALID(harmonaize_tensor_read(tensors[0], 0, NULL, 8), "NULL");
    INVALID(harmonaize_register(client, -1, 0, 4096, NULL), "NULL");

    INVALID(harmonaize_join(client, NULL, 0, 1, NULL, &none), "name");
    FAILS(harmonaize_join(client, "other", 3, 2, NULL, &none), HARMONAIZE_ERROR_JOIN, "3");
    CHECK(harmonaize_last_error()->reason == HARMONAIZE_REASON_RANK);
    harmonaize_join_options_t join = {.size = sizeof join, .budget = "vnmse=some", .timeout_ns = SECOND / 10};
    INVALID(harmonaize_join(client, "other", 0, 2, &join, &none), "`some`");
    join.budget = NULL;
    FAILS(harmonaize_join(client, "other", 0, 2, &join, &none), HARMONAIZE_ERROR_JOIN, "other");
    CHECK(harmonaize_last_error()->reason == HARMONAIZE_REASON_TIMEOUT);
    CHECK(harmonaize_last_error()->rank_count == 1 && harmonaize_last_error()->ranks[0] == 1);
    harmonaize_operation_options_t long_one = {.size = sizeof long_one, .timeout_ns = HARMONAIZE_FOREVER};
    FAILS(harmonaize_with(job, &long_one, &none), HARMONAIZE_ERROR_TIMEOUT_TOO_LONG, "operator");
    INVALID(harmonaize_rank_before(job, ranks, &rank), "there is none");

    INVALID(harmonaize_all_reduce(NULL, tensors[0], tensors[0], HARMONAIZE_SUM, &operation), "communicator");
    INVALID(harmonaize_all_reduce(job, NULL, tensors[0], HARMONAIZE_SUM, &operation), "tensor");
    INVALID(harmonaize_all_reduce(job, tensors[0], tensors[0], 99, &operation), "99 is no reduction");
    INVALID(harmonaize_all_reduce(job, tensors[0], tensors[0], HARMONAIZE_SUM, NULL), "result");
    FAILS(harmonaize_all_reduce(job, tensors[0], tensors[1], HARMONAIZE_SUM, &operation), HARMONAIZE_ERROR_DTYPE, "f32");
    FAILS(harmonaize_all_reduce(job, tensors[0], tensors[2], HARMONAIZE_SUM, &operation), HARMONAIZE_ERROR_SHAPE, "4");
    FAILS(harmonaize_all_reduce(job, tensors[1], tensors[1], HARMONAIZE_BAND, &operation), HARMONAIZE_ERROR_REDUCTION,
          "band");
    CHECK(!operation);
    FAILS(harmonaize_all_gather_v(job, tensors[0], tensors[0], counts, 3, &operation), HARMONAIZE_ERROR_SHAPE, "3 counts");
    INVALID(harmonaize_all_gather_v(job, tensors[0], tensors[0], NULL, 1, &operation), "counts");
    FAILS(harmonaize_broadcast(job, tensors[0], tensors[0], 7, &operation), HARMONAIZE_ERROR_SHAPE, "root 7");
    FAILS(harmonaize_send(job, tensors[0], 7, &operation), HARMONAIZE_ERROR_SHAPE, "rank 7");
    INVALID(harmonaize_wait(NULL, 0, NULL), "operation");
    INVALID(harmonaize_test(NULL, NULL), "operation");
    INVALID(harmonaize_abort(NULL), "communicator");

    harmonaize_protection_t *protection;
    harmonaize_named_tensor_t nameless = {NULL, tensors[0]}, no_handle = {"weights", NULL};
    INVALID(harmonaize_protect(job, NULL, 1, NULL, &protection), "1 tensors");
    INVALID(harmonaize_protect(job, &nameless, 1, NULL, &protection), "name");
    INVALID(harmonaize_protect(job, &no_handle, 1, NULL, &protection), "tensor");
    CHECK(!protection);
    INVALID(harmonaize_seal(NULL, 1), "protection");
    INVALID(harmonaize_begin_seal(NULL, 1), "protection");
    INVALID(harmonaize_end_seal(NULL, 1), "protection");
    INVALID(harmonaize_restore_newcomer(job, NULL, 1, NULL), "result");

    /* Of two attachments. */
    harmonaize_client_t *second;
    OK(harmonaize_attach(NULL, NULL, &second));
    OK(harmonaize_tensor_create(second, HARMONAIZE_U64, 3, &no_tensor));
    FAILS(harmonaize_all_reduce(job, no_tensor, no_tensor, HARMONAIZE_SUM, &operation), HARMONAIZE_ERROR_FOREIGN, "client");
    harmonaize_client_free(second);
    harmonaize_tensor_free(no_tensor);

    harmonaize_client_free(NULL);
    harmonaize_communicator_free(NULL);
    harmonaize_operation_free(NULL);
    harmonaize_tensor_free(NULL);
    for (size_t at = 0; at < COUNT(tensors); at++)
        harmonaize_tensor_free(tensors[at]);
    leave();
}

/* Rank 1 calls only once rank 0 has found that waiting was too short. */
static void patience(void) {
    join("patience");
    uint64_t *a, *b, mine[1] = {3};
    harmonaize_tensor_t *sum = tensor(1, mine, &a), *word = tensor(1, mine, &b);
    harmonaize_operation_t *operation, *message;
    if (rank == 0) {
        OK(harmonaize_all_reduce(job, sum, sum, HARMONAIZE_SUM, &operation));
        CHECK(harmonaize_test(operation, NULL) == HARMONAIZE_IN_PROGRESS);
        FAILS(harmonaize_wait(operation, SECOND / 100, NULL), HARMONAIZE_ERROR_WAIT_TIMEOUT, "allreduce");
        size_t ended;
        FAILS(harmonaize_wait_any(&operation, 1, SECOND / 100, &ended), HARMONAIZE_ERROR_WAIT_TIMEOUT, "1 operations");
        harmonaize_operation_t *twice[2] = {operation, operation};
        FAILS(harmonaize_wait_any(twice, 2, 0, &ended), HARMONAIZE_ERROR_IN_USE, "twice");
        OK(harmonaize_send(job, word, 1, &message));
        done(HARMONAIZE_OK, message, __LINE__);
    } else {
        OK(harmonaize_recv(job, word, 0, &message));
        done(HARMONAIZE_OK, message, __LINE__);
        OK(harmonaize_all_reduce(job, sum, sum, HARMONAIZE_SUM, &operation));
    }
    OK(harmonaize_wait(operation, STEP, NULL));
    OK(harmonaize_wait(operation, 0, NULL));
    CHECK(a[0] == 6);
    harmonaize_operation_free(operation);
    harmonaize_tensor_free(sum);
    harmonaize_tensor_free(word);
    leave();
}

/* Ranks call different counts: both learn who called what. */
static void mismatch(void) {
    join("mismatch");
    uint64_t *data;
    harmonaize_tensor_t *sum = tensor(100 + rank, NULL, &data);
    memset(data, 0, (100 + rank) * sizeof *data);
    harmonaize_operation_t *operation;
    OK(harmonaize_all_reduce(job, sum, sum, HARMONAIZE_SUM, &operation));
    FAILS(harmonaize_wait(operation, STEP, NULL), HARMONAIZE_ERROR_MISMATCH, "101 x u64");
    harmonaize_operation_free(operation);
    harmonaize_tensor_free(sum);
    leave();
}

/* Rank 1 never calls: the error names it. */
static void late(void) {
    join("late");
    uint64_t *data;
    harmonaize_tensor_t *sum = tensor(1, NULL, &data);
    harmonaize_operation_options_t options = {.size = sizeof options, .timeout_ns = SECOND / 2};
    harmonaize_communicator_t *with;
    harmonaize_operation_t *operation;
    data[0] = 0;
    OK(harmonaize_with(job, &options, &with));
    if (rank == 0) {
        OK(harmonaize_all_reduce(with, sum, sum, HARMONAIZE_SUM, &operation));
        FAILS(harmonaize_wait(operation, STEP, NULL), HARMONAIZE_ERROR_TIMEOUT, "1");
        CHECK(harmonaize_last_error()->rank_count == 1 && harmonaize_last_error()->ranks[0] == 1);
    } else {
        OK(harmonaize_recv(job, sum, 0, &operation));
        CHECK(harmonaize_wait(operation, STEP, NULL) == HARMONAIZE_ERROR_TIMEOUT);
    }
    harmonaize_operation_free(operation);
    harmonaize_communicator_free(with);
    harmonaize_tensor_free(sum);
    leave();
}

static void *waits(void *operation) {
    harmonaize_status_t status;
    do
        status = harmonaize_wait(operation, HARMONAIZE_FOREVER, NULL);
    while (status == HARMONAIZE_ERROR_IN_USE);
    /* The last error is each thread's own. */
    const harmonaize_error_t *error = harmonaize_last_error();
    return (void *)(intptr_t)(error && error->status == status ? status : HARMONAIZE_ERROR_OTHER);
}

/* A thread of rank 0 waits for what never comes, and another one aborts. */
static void abort_(void) {
    join("abort");
    uint64_t *data;
    harmonaize_tensor_t *word = tensor(1, NULL, &data);
    harmonaize_operation_t *operation;
    OK(harmonaize_recv(job, word, !rank, &operation));
    if (rank == 0) {
        pthread_t thread;
        void *status;
        CHECK(pthread_create(&thread, NULL, waits, operation) == 0);
        harmonaize_status_t tested;
        while ((tested = harmonaize_test(operation, NULL)) == HARMONAIZE_IN_PROGRESS)
            sched_yield();
        FAILS(tested, HARMONAIZE_ERROR_IN_USE, "another thread");
        OK(harmonaize_abort(job));
        CHECK(pthread_join(thread, &status) == 0 && (intptr_t)status == HARMONAIZE_ERROR_ABORTED);
        CHECK(harmonaize_last_error()->status == HARMONAIZE_ERROR_IN_USE);
    } else {
        FAILS(harmonaize_wait(operation, STEP, NULL), HARMONAIZE_ERROR_ABORTED, "by rank 0");
        CHECK(harmonaize_last_error()->rank_count == 1 && harmonaize_last_error()->ranks[0] == 0);
    }
    harmonaize_operation_free(operation);
    if (rank == 0) {
        FAILS(harmonaize_barrier(job, &operation), HARMONAIZE_ERROR_ABORTED, "aborted");
    } else {
        OK(harmonaize_barrier(job, &operation));
        FAILS(harmonaize_wait(operation, STEP, NULL), HARMONAIZE_ERROR_ABORTED, "by rank 0");
        harmonaize_operation_free(operation);
    }
    harmonaize_tensor_free(word);
    leave();
}

/* A child has typed errors, and what it frees is not its parent's. */
static void forked(void) {
    join("forked");
    uint64_t *data, mine[1] = {1};
    harmonaize_tensor_t *sum = tensor(1, mine, &data);
    harmonaize_operation_t *operation;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        void *bytes;
        FAILS(harmonaize_all_reduce(job, sum, sum, HARMONAIZE_SUM, &operation), HARMONAIZE_ERROR_FORKED, "attach");
        CHECK(harmonaize_tensor_data(sum, &bytes) == HARMONAIZE_ERROR_FORKED);
        CHECK(harmonaize_tensor_write(sum, 0, mine, 8) == HARMONAIZE_ERROR_FORKED);
        harmonaize_tensor_free(sum);
        leave();
        _exit(EXIT_SUCCESS);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS);
    DONE(harmonaize_all_reduce(job, sum, sum, HARMONAIZE_SUM, &operation));
    CHECK(data[0] == ranks);
    harmonaize_tensor_free(sum);
    leave();
}

/* Members go on as another communicator. */
static void regroup(void) {
    join("regroup");
    harmonaize_communicator_t *next;
    harmonaize_operation_t *operation;
    uint32_t key = ranks - rank, value;
    harmonaize_regroup_options_t options = {
        .size = sizeof options, .timeout_ns = STEP, .key = &key, .min_ranks = ranks};
    OK(harmonaize_regroup(job, &options, &next));
    harmonaize_communicator_free(job);
    job = next;
    OK(harmonaize_rank(job, &value));
    CHECK(value == ranks - 1 - rank);
    OK(harmonaize_rank_before(job, value, &value));
    CHECK(value == rank);
    DONE(harmonaize_barrier(job, &operation));
    leave();
}

/* State is sealed, restored, taken over from another rank, and written. */
static void protect(void) {
    join("protect");
    CHECK(ranks == 2);
    uint64_t *data, *copy, domain = rank, step, values[3] = {10 + rank, 20 + rank, 30 + rank};
    uint32_t other = !rank, nobody = 7;
    harmonaize_tensor_t *weights = tensor(3, values, &data), *taken = tensor(3, NULL, &copy);
    harmonaize_named_tensor_t named = {"weights", weights};
    harmonaize_protect_options_t options = {.size = sizeof options, .timeout_ns = STEP};
    harmonaize_protection_t *protection;
    char path[4096];
    CHECK(getenv("ID") && snprintf(path, sizeof path, "%s-%" PRIu32, getenv("ID"), rank) < (int)sizeof path);

    /* Both are on one machine. */
    FAILS(harmonaize_protect(job, &named, 1, &options, &protection), HARMONAIZE_ERROR_TOO_FEW_DOMAINS, "2 failure domains");
    CHECK(!protection);
    options.domain = &domain;
    OK(harmonaize_protect(job, &named, 1, &options, &protection));
    OK(harmonaize_committed(protection, &step));
    CHECK(step == HARMONAIZE_NO_STEP);
    FAILS(harmonaize_write_safetensors(protection, path, NULL), HARMONAIZE_ERROR_NOTHING_SEALED, "no step");
    OK(harmonaize_seal(protection, 1));
    OK(harmonaize_protection_wait(protection, STEP));
    data[0]++;
    OK(harmonaize_begin_seal(protection, 2));
    OK(harmonaize_end_seal(protection, STEP));
    OK(harmonaize_committed(protection, &step));
    CHECK(step == 1);
    OK(harmonaize_protection_wait(protection, STEP));
    FAILS(harmonaize_seal(protection, 2), HARMONAIZE_ERROR_DIFFER, "steps 2 to 2");
    OK(harmonaize_write_safetensors(protection, path, &step));
    CHECK(step == 2 && access(path, R_OK) == 0);
    FAILS(harmonaize_write_safetensors(protection, "/nowhere/state", NULL), HARMONAIZE_ERROR_FILE, "/nowhere/state");

    /* A step that nobody seals. */
    memset(data, 0, sizeof values);
    harmonaize_communicator_t *next;
    harmonaize_regroup_options_t regroup = {.size = sizeof regroup, .timeout_ns = STEP, .min_ranks = ranks};
    harmonaize_restored_t *restored;
    harmonaize_restored_tensor_t found;
    const uint32_t *lost;
    size_t count;
    OK(harmonaize_regroup(job, &regroup, &next));
    FAILS(harmonaize_restore(protection, next, &nobody, 1, &restored), HARMONAIZE_ERROR_SHAPE, "rank 7");
    CHECK(!restored && data[0] == 0);
    OK(harmonaize_restore(protection, next, &other, 1, &restored));
    CHECK(data[0] == 11 + rank && data[1] == 20 + rank && data[2] == 30 + rank);
    OK(harmonaize_restored_step(restored, &step));
    OK(harmonaize_restored_lost(restored, &lost, &count));
    CHECK(step == 2 && !lost && count == 0);
    OK(harmonaize_restored_tensors(restored, 0, &count));
    OK(harmonaize_restored_tensor(restored, 0, 0, &found));
    CHECK(count == 1 && strcmp(found.name, "weights") == 0 && found.dtype == HARMONAIZE_U64 && found.elements == 3);
    INVALID(harmonaize_restored_tensor(restored, 0, 1, &found), "tensor 1 of 1");
    INVALID(harmonaize_restored_tensors(restored, 1, &count), "state 1 of 1");
    OK(harmonaize_restored_read(restored, 0, "weights", taken));
    CHECK(copy[0] == 11 + other && copy[2] == 30 + other);
    FAILS(harmonaize_restored_read(restored, 0, "bias", taken), HARMONAIZE_ERROR_SHAPE, "bias");
    CHECK(remove(path) == 0);
    OK(harmonaize_restored_write_safetensors(restored, 0, path));
    CHECK(remove(path) == 0);
    harmonaize_restored_free(restored);

    /* Rank 1 comes as one without a state: its own is that of the replica. */
    OK(rank ? harmonaize_restore_newcomer(next, &rank, 1, &restored)
            : harmonaize_restore(protection, next, NULL, 0, &restored));
    OK(harmonaize_restored_lost(restored, &lost, &count));
    CHECK(count == 1 && lost[0] == 1);
    if (rank) {
        memset(copy, 0, sizeof values);
        OK(harmonaize_restored_read(restored, 0, "weights", taken));
        CHECK(copy[0] == 12 && copy[1] == 21);
    }
    harmonaize_restored_free(restored);
    harmonaize_tensor_free(weights);
    harmonaize_tensor_free(taken);
    harmonaize_protection_free(protection);
    harmonaize_protection_free(NULL);
    harmonaize_restored_free(NULL);
    harmonaize_communicator_free(job);
    job = next;
    leave();
}

/* The text says which socket, and what to start. */
static void no_agent(void) {
    setenv("HARMONAIZE_SOCKET", "/nowhere/agent.sock", 1);
    FAILS(harmonaize_attach(NULL, NULL, &client), HARMONAIZE_ERROR_CONNECT, "/nowhere/agent.sock");
    CHECK(!client && strstr(harmonaize_last_error()->text, "start harmonaize-agent on this host"));
    FAILS(harmonaize_attach("/elsewhere", NULL, &client), HARMONAIZE_ERROR_CONNECT, "/elsewhere");
    setenv("HARMONAIZE_SOCKET", "", 1);
    FAILS(harmonaize_attach(NULL, NULL, &client), HARMONAIZE_ERROR_ENVIRONMENT, "set HARMONAIZE_SOCKET");
    uint32_t rank = 7, others = 7;
    CHECK(harmonaize_place(&rank, &others) == HARMONAIZE_OK && rank == 0 && others == 1);
    setenv("WORLD_SIZE", "none", 1);
    FAILS(harmonaize_place(&rank, &others), HARMONAIZE_ERROR_ENVIRONMENT, "WORLD_SIZE=none is no number");
    setenv("WORLD_SIZE", "1", 1);
    FAILS(harmonaize_place(NULL, &others), HARMONAIZE_ERROR_INVALID_ARGUMENT, "");
    CHECK(strcmp(harmonaize_status_text(HARMONAIZE_ERROR_CONNECT), "cannot connect to the agent") == 0);
    CHECK(harmonaize_version()[0] == '0');
}

static const struct {
    const char *name;
    void (*run)(void);
} CASES[] = {
    {"collectives", collectives}, {"calls", calls},   {"provider", provider}, {"wrong", wrong},
    {"patience", patience},       {"mismatch", mismatch}, {"late", late},     {"abort", abort_},
    {"forked", forked},           {"regroup", regroup},   {"protect", protect},
    {"no_agent", no_agent},
};

int main(int argc, char **argv) {
    for (size_t at = 0; argc == 2 && at < COUNT(CASES); at++) {
        if (strcmp(CASES[at].name, argv[1]) == 0) {
            CASES[at].run();
            return EXIT_SUCCESS;
        }
    }
    fprintf(stderr, "no such case\n");
    return EXIT_FAILURE;
}
