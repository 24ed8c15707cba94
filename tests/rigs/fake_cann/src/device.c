/* Devices: which are visible, which one a thread uses. */
#include "fake_cann.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static __thread int device_of_thread = -1;
static int contexts[MAX_DEVICES]; /* the address of an element is a context */

int current_device(void) { return device_of_thread; }

/* Physical ids of the visible devices; how many, or -1 where the variable is not a list of devices of this host. */
static int visible(int ids[MAX_DEVICES]) {
    int total = (int)fake_cann_setting("FAKE_CANN_DEVICES", 4), count = 0;
    const char *text = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!text) {
        for (; count < total; count++) ids[count] = count;
        return count;
    }
    for (const char *at = text;; at++) {
        char *end;
        long id = strtol(at, &end, 10);
        if (end == at || id < 0 || id >= total || count == MAX_DEVICES || (*end && *end != ',')) return -1;
        ids[count++] = (int)id;
        if (!*end) return count;
        at = end;
    }
}

int num_devices(void) {
    int ids[MAX_DEVICES];
    return visible(ids);
}

int physical_device(int logical) {
    int ids[MAX_DEVICES];
    return logical >= 0 && logical < visible(ids) ? ids[logical] : -1;
}

aclError aclInit(const char *config) {
    ENTER();
    return num_devices() < 0 ? INVALID_DEVICE : OK;
}

aclError aclFinalize(void) { return OK; }

aclError aclrtGetDeviceCount(uint32_t *count) {
    ENTER();
    if (num_devices() < 0) return INVALID_DEVICE;
    *count = (uint32_t)num_devices();
    return OK;
}

aclError aclrtGetDevice(int32_t *device) {
    if (device_of_thread < 0) return NO_CONTEXT;
    *device = device_of_thread;
    return OK;
}

aclError aclrtSetDevice(int32_t device) {
    ENTER();
    if (physical_device(device) < 0) return INVALID_DEVICE;
    device_of_thread = device;
    return OK;
}

aclError aclrtResetDevice(int32_t device) { return OK; }

aclError aclrtGetCurrentContext(void **context) {
    if (device_of_thread < 0) return NO_CONTEXT;
    *context = &contexts[device_of_thread];
    return OK;
}

aclError aclrtSetCurrentContext(void *context) {
    device_of_thread = (int)((int *)context - contexts);
    return OK;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    *active = 1;
    return OK;
}

aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logical) {
    *logical = user;
    return OK;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = 1;
    return OK;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return OK; }

aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = getpid();
    return OK;
}

const char *aclrtGetSocName(void) { return "Ascend910B3"; }

const char *aclGetRecentErrMsg(void) { return ""; }

/* Settings that change speed or rounding on a device, and nothing here. */
aclError aclrtSetDeviceSatMode(int32_t mode) { return OK; }
aclError aclrtSetStreamFailureMode(stream *s, uint64_t mode) { return OK; }
aclError aclrtSetStreamOverflowSwitch(stream *s, uint32_t on) { return OK; }
aclError aclrtSetStreamAttribute(stream *s, int attribute, void *value) { return OK; }
aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) { return OK; }
aclError aclrtSetOpWaitTimeout(uint32_t seconds) { return OK; }
aclError aclrtPeekAtLastError(int32_t level) { return OK; }
aclError aclrtGetLastError(int32_t level) { return OK; }
