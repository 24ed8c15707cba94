/* What a test sees and steers: counters of calls, faults to come, settings from the environment. */
#define _DEFAULT_SOURCE
#include "fake_cann.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_NAMES = 256, NAME_BYTES = 64 };

typedef struct {
    char name[NAME_BYTES];
    long calls;
    long fails_at; /* the call that fails, counted from 1; 0 for none */
    bool for_good; /* and every one after it */
    int code;
    useconds_t slow; /* microseconds that each call takes before it does anything */
} record;

static record records[MAX_NAMES];
static int num_records;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static record *find(const char *name) {
    for (int i = 0; i < num_records; i++)
        if (!strcmp(records[i].name, name)) return &records[i];
    if (num_records == MAX_NAMES) abort();
    record *fresh = &records[num_records++];
    snprintf(fresh->name, NAME_BYTES, "%s", name);
    return fresh;
}

static void plant(const char *name, long calls_from_now, int code, bool for_good) {
    record *r = find(name);
    r->fails_at = r->calls + calls_from_now;
    r->code = code;
    r->for_good = for_good;
}

/* FAKE_CANN_FAULTS="name:n:code[:forever],…": the n-th call of `name` (from 1) returns `code`. */
__attribute__((constructor)) static void plant_from_environment(void) {
    const char *text = getenv("FAKE_CANN_FAULTS");
    char *copy = text ? strdup(text) : NULL, *rest = copy, *word;
    while (rest && (word = strsep(&rest, ","))) {
        char name[NAME_BYTES], forever[8] = "";
        long nth;
        int code;
        if (sscanf(word, "%63[^:]:%ld:%d:%7s", name, &nth, &code, forever) >= 3) plant(name, nth, code, forever[0]);
    }
    free(copy);
}

int fake_cann_call(const char *name) {
    pthread_mutex_lock(&lock);
    record *r = find(name);
    r->calls++;
    bool fails = r->fails_at && (r->calls == r->fails_at || (r->for_good && r->calls > r->fails_at));
    int code = fails ? r->code : OK;
    useconds_t slow = r->slow;
    pthread_mutex_unlock(&lock);
    if (slow) usleep(slow);
    if (getenv("FAKE_CANN_TRACE")) fprintf(stderr, "[fake cann] %s%s\n", name, code ? " (planted fault)" : "");
    return code;
}

long fake_cann_setting(const char *variable, long otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atol(text) : otherwise;
}

/* For tests, through ctypes. */
long FakeCannCalls(const char *name) {
    pthread_mutex_lock(&lock);
    long calls = find(name)->calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

void FakeCannFail(const char *name, long calls_from_now, int code, int for_good) {
    pthread_mutex_lock(&lock);
    plant(name, calls_from_now, code, for_good);
    pthread_mutex_unlock(&lock);
}

void FakeCannSlow(const char *name, uint32_t microseconds) {
    pthread_mutex_lock(&lock);
    find(name)->slow = microseconds;
    pthread_mutex_unlock(&lock);
}

static int sleep_for(void *microseconds) {
    usleep(*(useconds_t *)microseconds);
    return OK;
}

/* Keeps the stream busy, whoever waits for it. */
aclError FakeCannStall(stream *s, uint32_t microseconds) {
    useconds_t time = microseconds;
    return stream_submit(s, sleep_for, &time, sizeof time);
}

static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static long num_holds, num_released; /* a hold ends when as many are released as there were with it */

static int wait_for_release(void *hold) {
    pthread_mutex_lock(&lock);
    while (num_released < *(long *)hold) pthread_cond_wait(&released, &lock);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Keeps the stream busy until FakeCannRelease, however slow the machine is. */
aclError FakeCannHold(stream *s) {
    pthread_mutex_lock(&lock);
    long hold = ++num_holds;
    pthread_mutex_unlock(&lock);
    return stream_submit(s, wait_for_release, &hold, sizeof hold);
}

/* Ends every hold of this process. */
void FakeCannRelease(void) {
    pthread_mutex_lock(&lock);
    num_released = num_holds;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}
