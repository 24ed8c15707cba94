#pragma once
#include "fake_cann.h"

/* Waits for every stream of this process, as freeing memory does on a device. */
void stream_drain_all(void);
