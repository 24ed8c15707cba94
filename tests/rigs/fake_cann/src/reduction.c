/* Element types of HCCL and their arithmetic. */
#include "reduction.h"
#include "hccl.h"
#include <string.h>

/* HcclDataType */
enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BFP16 };
/* HcclReduceOp */
enum { SUM, PROD, MAX, MIN };

size_t element_bytes(int type) {
    static const size_t bytes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
    return type >= INT8 && type <= BFP16 ? bytes[type] : 0;
}

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16); /* to nearest, ties to even */
}

#define COMBINE(x, y) (op == SUM ? (x) + (y) : op == PROD ? (x) * (y) : op == MAX ? ((x) > (y) ? (x) : (y)) : ((x) < (y) ? (x) : (y)))

#define DEFINE(name, stored, read, write)                                                              \
    static void name(void *into, const void *from, uint64_t count, int op) {                           \
        stored *a = into;                                                                              \
        const stored *b = from;                                                                        \
        for (uint64_t i = 0; i < count; i++) a[i] = (stored)write(COMBINE(read(a[i]), read(b[i])));    \
    }

DEFINE(reduce_int8, int8_t, , )
DEFINE(reduce_int16, int16_t, , )
DEFINE(reduce_int32, int32_t, , )
DEFINE(reduce_int64, int64_t, , )
DEFINE(reduce_fp16, _Float16, (float), )
DEFINE(reduce_fp32, float, , )
DEFINE(reduce_bf16, uint16_t, from_bf16, to_bf16)

int reduce(void *into, const void *from, uint64_t count, int type, int op) {
    switch (type) {
        case INT8: reduce_int8(into, from, count, op); return OK;
        case INT16: reduce_int16(into, from, count, op); return OK;
        case INT32: reduce_int32(into, from, count, op); return OK;
        case INT64: reduce_int64(into, from, count, op); return OK;
        case FP16: reduce_fp16(into, from, count, op); return OK;
        case FP32: reduce_fp32(into, from, count, op); return OK;
        case BFP16: reduce_bf16(into, from, count, op); return OK;
        default: return HCCL_NOT_SUPPORTED;
    }
}
