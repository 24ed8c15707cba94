/* Streams and events with deferred execution.
 *
 * Each stream has a worker thread that runs its tasks in order, each one no earlier than FAKE_CANN_DELAY_US after it
 * was submitted. Whoever reads a result without waiting for it reads the old bytes. Waiting waives the delay, for the
 * tasks that are waited for and for those that these wait for, and for no others: a run is not slow, yet a stream that
 * nobody waits for is late. One lock guards all streams and events, one condition says that any of them has changed.
 */
#define _GNU_SOURCE
#include "stream.h"
#include "ipc_event.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* One record of an event; a later record, on the same stream or another, does not change it. */
typedef struct {
    stream *on; /* NULL: never recorded, or by another process */
    uint64_t number;
    ipc_event *shared; /* set: another process can see it, by its generation */
    uint64_t generation;
} moment;

typedef struct task {
    task_body run;
    void *arguments;
    event *waits_for; /* set: the task is the wait for `moment`, a record of this event */
    event *records;   /* set: the task is `moment` itself */
    moment moment;
    uint64_t number;
    int64_t due_ns;
    struct task *next;
} task;

struct stream {
    int device, id;
    uint64_t submitted, completed, demanded; /* numbers of tasks */
    task *first, *last;
    int failure;
    bool started, ending;
    pthread_t worker;
    struct stream *next;
};

struct event {
    moment last;
    int64_t time_ns;
    int users;
    bool imported;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static stream *streams, *defaults[MAX_DEVICES];
static int next_id;

__attribute__((constructor)) static void use_monotonic_clock(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void wait_until(int64_t deadline_ns) {
    struct timespec t = {deadline_ns / 1000000000LL, deadline_ns % 1000000000LL};
    pthread_cond_timedwait(&changed, &lock, &t);
}

/* ---- events; the lock is held -------------------------------------------------------------------------------- */

static void drop(event *e) {
    if (--e->users) return;
    if (e->last.shared) ipc_event_close(e->last.shared);
    free(e);
}

static moment last_record(event *e) {
    moment last = e->last;
    if (last.shared) last.generation = ipc_event_submitted(last.shared); /* another process may record it */
    return last;
}

static bool has_passed(moment m) {
    if (m.shared) return ipc_event_completed(m.shared) >= m.generation;
    return !m.on || m.on->completed >= m.number;
}

static void complete(event *e, moment m) {
    e->time_ns = now_ns();
    if (m.shared) ipc_event_complete(m.shared, m.generation);
}

/* ---- demand: waives delays; the lock is held ----------------------------------------------------------------- */

static void demand(stream *s, uint64_t number) {
    if (!s || s->demanded >= number) return;
    s->demanded = number;
    for (task *t = s->first; t && t->number <= number; t = t->next)
        if (t->waits_for) demand(t->moment.on, t->moment.number);
    pthread_cond_broadcast(&changed);
}

/* Another process tells nobody when its event completes: such a wait looks every 50 µs. */
static void wait_for(moment m) {
    while (!has_passed(m))
        if (m.shared)
            wait_until(now_ns() + 50000);
        else
            pthread_cond_wait(&changed, &lock);
}

static const int32_t FOREVER = -1; /* milliseconds */

static int wait_for_stream(stream *s, uint64_t number, int32_t milliseconds) {
    int64_t deadline_ns = now_ns() + milliseconds * 1000000LL;
    demand(s, number);
    while (s->completed < number) {
        if (milliseconds == FOREVER)
            pthread_cond_wait(&changed, &lock);
        else if (now_ns() >= deadline_ns)
            return SYNC_TIMEOUT;
        else
            wait_until(deadline_ns);
    }
    return s->failure;
}

/* ---- the worker ---------------------------------------------------------------------------------------------- */

/* After a failure a stream runs no more work, but its events complete: nobody waits for ever. */
static void perform(stream *s, task *t) {
    if (t->waits_for)
        wait_for(t->moment);
    else if (t->records)
        complete(t->records, t->moment);
    else if (!s->failure) {
        pthread_mutex_unlock(&lock);
        int failure = t->run(t->arguments);
        pthread_mutex_lock(&lock);
        s->failure = failure;
    }
}

static void *work(void *argument) {
    stream *s = argument;
    pthread_mutex_lock(&lock);
    while (s->first || !s->ending) {
        task *t = s->first;
        if (!t) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        while (now_ns() < t->due_ns && s->demanded < t->number && !s->ending) wait_until(t->due_ns);
        perform(s, t);
        s->first = t->next;
        s->completed = t->number;
        if (t->waits_for) drop(t->waits_for);
        if (t->records) drop(t->records);
        free(t->arguments);
        free(t);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static stream *create(int device) {
    stream *s = calloc(1, sizeof *s);
    s->device = device;
    s->id = ++next_id;
    s->next = streams;
    return streams = s;
}

/* The NULL stream is the default stream of the thread's device. */
static stream *resolve(stream *s) {
    if (s) return s;
    int device = current_device();
    if (device < 0) return NULL;
    return defaults[device] ? defaults[device] : (defaults[device] = create(device));
}

static void append(stream *s, task *t) {
    t->number = ++s->submitted;
    t->due_ns = now_ns() + fake_cann_setting("FAKE_CANN_DELAY_US", 1000) * 1000;
    if (s->first)
        s->last->next = t;
    else
        s->first = t;
    s->last = t;
    if (!s->started) s->started = !pthread_create(&s->worker, NULL, work, s);
    pthread_cond_broadcast(&changed);
}

static aclError submit(stream *s, task description) {
    task *t = malloc(sizeof *t);
    *t = description;
    s = resolve(s);
    if (s)
        append(s, t);
    else
        free(t);
    return s ? OK : NO_CONTEXT;
}

aclError stream_submit(stream *s, task_body run, const void *arguments, size_t size) {
    void *copy = memcpy(malloc(size), arguments, size);
    pthread_mutex_lock(&lock);
    aclError error = submit(s, (task){.run = run, .arguments = copy});
    pthread_mutex_unlock(&lock);
    return error;
}

void stream_drain_all(void) {
    pthread_mutex_lock(&lock);
    for (stream *s = streams; s; s = s->next) wait_for_stream(s, s->submitted, FOREVER);
    pthread_mutex_unlock(&lock);
}

/* ---- the public calls on streams ----------------------------------------------------------------------------- */

aclError aclrtCreateStream(stream **out) {
    ENTER();
    if (current_device() < 0) return NO_CONTEXT;
    pthread_mutex_lock(&lock);
    *out = create(current_device());
    pthread_mutex_unlock(&lock);
    return OK;
}

aclError aclrtCreateStreamWithConfig(stream **out, uint32_t priority, uint32_t flags) { return aclrtCreateStream(out); }

aclError aclrtDestroyStream(stream *s) {
    ENTER();
    pthread_mutex_lock(&lock);
    s->ending = true;
    pthread_cond_broadcast(&changed);
    stream **link = &streams;
    while (*link != s) link = &(*link)->next;
    *link = s->next;
    pthread_mutex_unlock(&lock);
    if (s->started) pthread_join(s->worker, NULL);
    return OK; /* the struct stays: events may name it */
}

aclError aclrtDestroyStreamForce(stream *s) { return aclrtDestroyStream(s); }

static aclError synchronize(stream *s, int32_t milliseconds) {
    pthread_mutex_lock(&lock);
    s = resolve(s);
    aclError error = s ? wait_for_stream(s, s->submitted, milliseconds) : NO_CONTEXT;
    pthread_mutex_unlock(&lock);
    return error;
}

/* What an operator's body does first (cpu_operators.py): a wait that counts as nobody's. */
aclError FakeCannDrain(stream *s) { return synchronize(s, FOREVER); }

aclError aclrtSynchronizeStreamWithTimeout(stream *s, int32_t milliseconds) {
    ENTER();
    return synchronize(s, milliseconds);
}

aclError aclrtSynchronizeStream(stream *s) {
    ENTER();
    return synchronize(s, FOREVER);
}

/* The timeout is each stream's. */
static aclError synchronize_device(int32_t milliseconds) {
    aclError error = OK;
    pthread_mutex_lock(&lock);
    for (stream *s = streams; s; s = s->next) {
        aclError failure = s->device == current_device() ? wait_for_stream(s, s->submitted, milliseconds) : OK;
        error = error ? error : failure;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
    ENTER();
    return synchronize_device(milliseconds);
}

aclError aclrtSynchronizeDevice(void) {
    ENTER();
    return synchronize_device(FOREVER);
}

aclError aclrtStreamQuery(stream *s, int32_t *status) {
    ENTER();
    pthread_mutex_lock(&lock);
    s = resolve(s);
    *status = s && s->completed < s->submitted; /* ACL_STREAM_STATUS_COMPLETE is 0 */
    pthread_mutex_unlock(&lock);
    return s ? OK : NO_CONTEXT;
}

aclError aclrtStreamGetId(stream *s, int32_t *id) {
    *id = s ? s->id : 0;
    return OK;
}

/* ---- the public calls on events ------------------------------------------------------------------------------ */

enum { FLAG_IPC = 0x40 /* ACL_EVENT_IPC */ };

aclError aclrtCreateEventExWithFlag(event **out, uint32_t flags) {
    ENTER();
    event *e = calloc(1, sizeof *e);
    e->users = 1;
    if (flags & FLAG_IPC && !(e->last.shared = ipc_event_create())) return MEMORY_ALLOCATION;
    *out = e;
    return OK;
}

aclError aclrtCreateEventWithFlag(event **out, uint32_t flags) { return aclrtCreateEventExWithFlag(out, flags); }

aclError aclrtDestroyEvent(event *e) {
    ENTER();
    pthread_mutex_lock(&lock);
    drop(e);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* An event that was opened from a handle is for waiting: the documentation shows no other use. */
aclError aclrtRecordEvent(event *e, stream *s) {
    ENTER();
    if (e->imported) return FEATURE_NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    if (e->last.shared) e->last.generation = ipc_event_submit(e->last.shared);
    e->users++;
    aclError error = submit(s, (task){.records = e, .moment = e->last});
    e->last.on = resolve(s);
    e->last.number = e->last.on ? e->last.on->submitted : 0;
    pthread_mutex_unlock(&lock);
    return error;
}

aclError aclrtStreamWaitEvent(stream *s, event *e) {
    ENTER();
    pthread_mutex_lock(&lock);
    e->users++;
    aclError error = submit(s, (task){.waits_for = e, .moment = last_record(e)});
    pthread_mutex_unlock(&lock);
    return error;
}

aclError aclrtResetEvent(event *e, stream *s) { return OK; }

aclError aclrtSynchronizeEvent(event *e) {
    ENTER();
    pthread_mutex_lock(&lock);
    moment last = last_record(e);
    demand(last.on, last.number);
    wait_for(last);
    int failure = last.on ? last.on->failure : OK;
    pthread_mutex_unlock(&lock);
    return failure;
}

static int status(event *e) {
    pthread_mutex_lock(&lock);
    bool done = has_passed(last_record(e));
    pthread_mutex_unlock(&lock);
    return done;
}

aclError aclrtQueryEventStatus(event *e, int32_t *recorded) {
    ENTER();
    *recorded = status(e); /* ACL_EVENT_RECORDED_STATUS_COMPLETE is 1 */
    return OK;
}

aclError aclrtQueryEventWaitStatus(event *e, int32_t *waiting) {
    ENTER();
    *waiting = !status(e); /* ACL_EVENT_WAIT_STATUS_COMPLETE is 0 */
    return OK;
}

aclError aclrtEventElapsedTime(float *milliseconds, event *start, event *end) {
    *milliseconds = (float)((end->time_ns - start->time_ns) / 1e6);
    return OK;
}

/* ---- events of other processes ------------------------------------------------------------------------------- */

aclError aclrtIpcGetEventHandle(event *e, ipc_event_handle *handle) {
    ENTER();
    return e->last.shared && ipc_event_export(e->last.shared, handle) ? OK : PARAM_INVALID;
}

aclError aclrtIpcOpenEventHandle(ipc_event_handle handle, event **out) {
    ENTER();
    ipc_event *shared = ipc_event_open(&handle);
    if (!shared) return PARAM_INVALID;
    event *e = calloc(1, sizeof *e);
    *e = (event){.users = 1, .last.shared = shared, .imported = true};
    *out = e;
    return OK;
}
