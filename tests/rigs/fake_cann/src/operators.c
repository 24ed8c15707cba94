/* Operators: Python gives torch_npu its arithmetic (python/cpu_operators.py); whoever asks for one here is told that
 * it does not exist, never handed zeros. Two do: torch_npu's own all_gather of lists pads its messages with them. */
#include "fake_cann.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *data;
    size_t size;
} buffer;

typedef struct {
    int type, dims, format;
    int64_t sizes[16];
} description;

aclError FakeCannDrain(stream *s);

buffer *aclCreateDataBuffer(void *data, size_t size) {
    buffer *b = malloc(sizeof *b);
    *b = (buffer){data, size};
    return b;
}

aclError aclDestroyDataBuffer(buffer *b) {
    free(b);
    return OK;
}

description *aclCreateTensorDesc(int type, int dims, const int64_t *sizes, int format) {
    description *d = calloc(1, sizeof *d);
    *d = (description){.type = type, .dims = dims, .format = format};
    memcpy(d->sizes, sizes, sizeof *sizes * (size_t)(dims < 16 ? dims : 16));
    return d;
}

void aclDestroyTensorDesc(description *d) { free(d); }
int aclGetTensorDescType(const description *d) { return d->type; }
int aclGetTensorDescFormat(const description *d) { return d->format; }
size_t aclGetTensorDescNumDims(const description *d) { return (size_t)d->dims; }

/* What only concerns a device's own layouts and the compiler. */
aclError aclSetTensorFormat(description *d, int format) { return OK; }
aclError aclSetTensorShape(description *d, int dims, const int64_t *sizes) { return OK; }
aclError aclSetTensorPlaceMent(description *d, int place) { return OK; }
void aclSetTensorDescName(description *d, const char *name) {}
void *aclopCreateAttr(void) { return NULL; }
void aclopDestroyAttr(const void *attributes) {}
aclError aclopSetAttrBool(void *attributes, const char *name, uint8_t value) { return OK; }
aclError aclopSetAttrInt(void *attributes, const char *name, int64_t value) { return OK; }
aclError aclopSetAttrFloat(void *attributes, const char *name, float value) { return OK; }
aclError aclopSetAttrString(void *attributes, const char *name, const char *value) { return OK; }
aclError aclopSetAttrDataType(void *attributes, const char *name, int value) { return OK; }

/* Bytes of an aclDataType; 0 for those that nobody has sent yet. */
static size_t element(int type) {
    switch (type) {
        case 0: case 3: case 8: return 4;          /* float32, int32, uint32 */
        case 1: case 6: case 7: case 27: return 2; /* float16, int16, uint16, bfloat16 */
        case 2: case 4: case 12: return 1;         /* int8, uint8, bool */
        case 9: case 10: case 11: return 8;        /* int64, uint64, float64 */
        default: return 0;
    }
}

/* Inputs: shape, value. */
static bool fill(description **types, buffer **in, buffer *out) {
    size_t size = element(types[1]->type);
    if (!size || in[1]->size < size) return false;
    for (size_t at = 0; at + size <= out->size; at += size) memcpy(out->data + at, in[1]->data, size);
    return true;
}

/* Inputs: a row [n] or [1, n]; (before, after) of each axis. Pads with zeros. */
static bool pad(description **types, buffer **in, buffer *out) {
    int axis = types[0]->dims - 1;
    if (axis > 1 || axis < 0 || (axis == 1 && types[0]->sizes[0] != 1)) return false;
    bool wide = element(types[1]->type) == 8;
    int64_t before = wide ? ((int64_t *)in[1]->data)[2 * axis] : ((int32_t *)in[1]->data)[2 * axis];
    size_t unit = element(types[0]->type), start = (size_t)before * unit, size = (size_t)types[0]->sizes[axis] * unit;
    if (!unit || start > out->size) return false;
    memset(out->data, 0, out->size);
    memcpy(out->data + start, in[0]->data, start + size > out->size ? out->size - start : size);
    return true;
}

aclError aclopCompileAndExecute(const char *name, int num_inputs, description **types, buffer **in, int num_outputs,
                                description **out_types, buffer **out, const void *attributes, int engine, int flag,
                                const char *path, stream *s) {
    ENTER();
    aclError error = FakeCannDrain(s);
    if (error) return error;
    if (!strcmp(name, "Fill") && num_inputs == 2 && fill(types, in, out[0])) return OK;
    if (!strcmp(name, "PadV3") && num_inputs >= 2 && pad(types, in, out[0])) return OK;
    fprintf(stderr, "[fake cann] operator %s is not implemented\n", name);
    return OPERATOR_NOT_SUPPORTED;
}
