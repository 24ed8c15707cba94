#pragma once
#include <stddef.h>
#include <stdint.h>

/* Bytes of an element of an HcclDataType; 0 for an unknown one. */
size_t element_bytes(int type);

/* into[i] = into[i] (op) from[i]; HCCL_NOT_SUPPORTED for types that HcclAllReduce does not list for Atlas A2:
 * unsigned integers and float64. */
int reduce(void *into, const void *from, uint64_t count, int type, int op);
