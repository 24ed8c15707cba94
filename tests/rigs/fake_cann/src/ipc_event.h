/* The state of an event that several processes see: a page of shared memory. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef struct ipc_event ipc_event;

typedef struct {
    char text[64];
} ipc_event_handle;

ipc_event *ipc_event_create(void);
ipc_event *ipc_event_open(const ipc_event_handle *handle);
bool ipc_event_export(ipc_event *e, ipc_event_handle *handle);
void ipc_event_close(ipc_event *e);

uint64_t ipc_event_submit(ipc_event *e);
uint64_t ipc_event_submitted(ipc_event *e);
void ipc_event_complete(ipc_event *e, uint64_t generation);
uint64_t ipc_event_completed(ipc_event *e);
