/* What the parts of the stand-in CANN share. Signatures follow the public ACL and HCCL headers. */
#pragma once
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int aclError;
typedef struct stream stream;
typedef struct event event;

/* Values of acl/error_codes/rt_error_codes.h and acl/acl_base.h. */
enum {
    OK = 0,
    PARAM_INVALID = 107000,
    INVALID_DEVICE = 107001,
    NO_CONTEXT = 107002,
    SYNC_TIMEOUT = 107020,
    FEATURE_NOT_SUPPORTED = 207000,
    MEMORY_ALLOCATION = 207001,
    OPERATOR_NOT_SUPPORTED = 500001,
    TASK_FAILED = 507000,
};

enum { MAX_DEVICES = 16 };

/* First statement of every call that can fail: counts it, and returns what a test has planted for it. */
#define ENTER()                                  \
    do {                                         \
        int planted_ = fake_cann_call(__func__); \
        if (planted_) return planted_;           \
    } while (0)

int fake_cann_call(const char *name); /* control.c */
long fake_cann_setting(const char *variable, long otherwise);

int current_device(void); /* device.c: logical, -1 where none is set */
int num_devices(void);    /* visible ones; -1 where ASCEND_RT_VISIBLE_DEVICES is invalid */
int physical_device(int logical);

/* stream.c. `run` is called by the stream's worker, in order; it may block. Returns 0, or what the stream fails with. */
typedef int (*task_body)(void *arguments);
aclError stream_submit(stream *s, task_body run, const void *arguments, size_t size);
