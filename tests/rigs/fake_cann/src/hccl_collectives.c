/* Collectives: tasks on a stream that talk to the peers. Sums are formed in rank order: every rank gets equal bits. */
#include "hccl.h"
#include "reduction.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct call {
    HcclResult (*run)(struct call *);
    const char *name;
    communicator *comm;
    char *in, *out;
    uint64_t count;
    size_t bytes; /* of one rank's part */
    int type, op, peer;
} call;

static int run_call(void *arguments) {
    call *c = arguments;
    HcclResult error = fake_cann_call(c->name);
    if (!error) error = c->run(c);
    if (error) c->comm->async_error = error;
    return error ? TASK_FAILED : OK;
}

static HcclResult issue(call c, void *stream) {
    if (c.comm->destroyed || c.peer < 0 || c.peer >= c.comm->size) return HCCL_PARAMETER;
    if (c.count && !c.bytes) return HCCL_NOT_SUPPORTED;
    if (!hccl_enter()) return HCCL_INTERNAL;
    HcclResult error = stream_submit(stream, run_call, &c, sizeof c) ? HCCL_INTERNAL : OK;
    hccl_leave();
    return error;
}

/* ---- bodies -------------------------------------------------------------------------------------------------- */

/* Every pair exchanges; the lower rank speaks first, so that two never wait for each other. */
static HcclResult exchange(communicator *c, int peer, const void *mine, void *theirs, size_t bytes) {
    HcclResult error = c->rank < peer ? put(c->peers[peer], mine, bytes) : get(c->peers[peer], theirs, bytes);
    if (error) return error;
    return c->rank < peer ? get(c->peers[peer], theirs, bytes) : put(c->peers[peer], mine, bytes);
}

static HcclResult gather_into(call *c, const char *mine, char *all) {
    memmove(all + (size_t)c->comm->rank * c->bytes, mine, c->bytes);
    for (int i = 0; i < c->comm->size; i++) {
        HcclResult error = i == c->comm->rank ? OK : exchange(c->comm, i, mine, all + (size_t)i * c->bytes, c->bytes);
        if (error) return error;
    }
    return OK;
}

static HcclResult all_gather(call *c) {
    char *mine = memcpy(malloc(c->bytes + 1), c->in, c->bytes); /* `in` may lie in `out` */
    HcclResult error = gather_into(c, mine, c->out);
    free(mine);
    return error;
}

/* Rank `first`'s count elements, and those of the others added to it, for elements from `offset` on. */
static HcclResult combine(call *c, char *all, size_t offset, uint64_t count, char *out) {
    HcclResult error = OK;
    for (int i = 1; i < c->comm->size && !error; i++)
        error = reduce(all + offset, all + (size_t)i * c->bytes + offset, count, c->type, c->op);
    if (!error) memcpy(out, all + offset, count * element_bytes(c->type));
    return error;
}

static HcclResult all_reduce(call *c) {
    char *all = malloc(c->bytes * (size_t)c->comm->size + 1);
    HcclResult error = gather_into(c, c->in, all);
    if (!error) error = combine(c, all, 0, c->count, c->out);
    free(all);
    return error;
}

static HcclResult reduce_scatter(call *c) {
    char *all = malloc(c->bytes * (size_t)c->comm->size + 1);
    size_t part = c->bytes / (size_t)c->comm->size;
    HcclResult error = gather_into(c, c->in, all);
    if (!error) error = combine(c, all, part * (size_t)c->comm->rank, c->count / (uint64_t)c->comm->size, c->out);
    free(all);
    return error;
}

static HcclResult broadcast(call *c) {
    if (c->comm->rank != c->peer) return get(c->comm->peers[c->peer], c->out, c->bytes);
    HcclResult error = OK;
    for (int i = 0; i < c->comm->size && !error; i++)
        if (i != c->peer) error = put(c->comm->peers[i], c->in, c->bytes);
    return error;
}

static HcclResult scatter(call *c) {
    if (c->comm->rank != c->peer) return get(c->comm->peers[c->peer], c->out, c->bytes);
    HcclResult error = OK;
    for (int i = 0; i < c->comm->size && !error; i++)
        if (i != c->peer) error = put(c->comm->peers[i], c->in + (size_t)i * c->bytes, c->bytes);
    memmove(c->out, c->in + (size_t)c->peer * c->bytes, c->bytes);
    return error;
}

static HcclResult all_to_all(call *c) {
    size_t mine = (size_t)c->comm->rank * c->bytes;
    memcpy(c->out + mine, c->in + mine, c->bytes);
    for (int i = 0; i < c->comm->size; i++) {
        size_t at = (size_t)i * c->bytes;
        HcclResult error = i == c->comm->rank ? OK : exchange(c->comm, i, c->in + at, c->out + at, c->bytes);
        if (error) return error;
    }
    return OK;
}

static HcclResult send_one(call *c) { return put(c->comm->peers[c->peer], c->in, c->bytes); }
static HcclResult receive_one(call *c) { return get(c->comm->peers[c->peer], c->out, c->bytes); }

/* ---- the public calls ---------------------------------------------------------------------------------------- */

static const int REDUCIBLE_PROBE = 0;

static bool reducible(int type) {
    char a[8] = {0}, b[8] = {0};
    return reduce(a, b, 1, type, REDUCIBLE_PROBE) == OK;
}

HcclResult HcclAllReduce(void *in, void *out, uint64_t count, int type, int op, communicator *comm, void *stream) {
    ENTER();
    if (!reducible(type)) return HCCL_NOT_SUPPORTED;
    return issue((call){all_reduce, "HcclAllReduce on the stream", comm, in, out, count, count * element_bytes(type), type, op}, stream);
}

HcclResult HcclReduce(void *in, void *out, uint64_t count, int type, int op, uint32_t root, communicator *comm, void *stream) {
    ENTER();
    return HcclAllReduce(in, out, count, type, op, comm, stream); /* the others' `out` may hold anything */
}

HcclResult HcclReduceScatter(void *in, void *out, uint64_t count, int type, int op, communicator *comm, void *stream) {
    ENTER();
    if (!reducible(type)) return HCCL_NOT_SUPPORTED;
    uint64_t all = count * (uint64_t)comm->size;
    return issue((call){reduce_scatter, "HcclReduceScatter on the stream", comm, in, out, all, all * element_bytes(type), type, op}, stream);
}

HcclResult HcclAllGather(void *in, void *out, uint64_t count, int type, communicator *comm, void *stream) {
    ENTER();
    return issue((call){all_gather, "HcclAllGather on the stream", comm, in, out, count, count * element_bytes(type), type}, stream);
}

HcclResult HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, communicator *comm, void *stream) {
    ENTER();
    return issue((call){broadcast, "HcclBroadcast on the stream", comm, buffer, buffer, count, count * element_bytes(type), type, 0, (int)root}, stream);
}

HcclResult HcclScatter(void *in, void *out, uint64_t count, int type, uint32_t root, communicator *comm, void *stream) {
    ENTER();
    return issue((call){scatter, "HcclScatter on the stream", comm, in, out, count, count * element_bytes(type), type, 0, (int)root}, stream);
}

HcclResult HcclAlltoAll(const void *in, uint64_t count, int type, void *out, uint64_t out_count, int out_type, communicator *comm, void *stream) {
    ENTER();
    if (count != out_count || type != out_type) return HCCL_PARAMETER;
    return issue((call){all_to_all, "HcclAlltoAll on the stream", comm, (char *)in, out, count, count * element_bytes(type), type}, stream);
}

HcclResult HcclSend(void *buffer, uint64_t count, int type, uint32_t peer, communicator *comm, void *stream) {
    ENTER();
    if ((int)peer == comm->rank) return HCCL_PARAMETER;
    return issue((call){send_one, "HcclSend on the stream", comm, buffer, NULL, count, count * element_bytes(type), type, 0, (int)peer}, stream);
}

HcclResult HcclRecv(void *buffer, uint64_t count, int type, uint32_t peer, communicator *comm, void *stream) {
    ENTER();
    if ((int)peer == comm->rank) return HCCL_PARAMETER;
    return issue((call){receive_one, "HcclRecv on the stream", comm, NULL, buffer, count, count * element_bytes(type), type, 0, (int)peer}, stream);
}

static HcclResult meet(call *c) {
    char mine = 0, all[MAX_RANKS];
    c->bytes = 1;
    return gather_into(c, &mine, all);
}

HcclResult HcclBarrier(communicator *comm, void *stream) {
    ENTER();
    return issue((call){meet, "HcclBarrier on the stream", comm}, stream);
}
