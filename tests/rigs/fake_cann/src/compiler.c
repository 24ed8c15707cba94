/* libacl_op_compiler: nothing is compiled here, and who asks for it is told. */
#include <stdint.h>
#include <string.h>

int aclSetCompileopt(int option, const char *value) { return 0; }

uint64_t aclGetCompileoptSize(int option) { return 64; }

int aclGetCompileopt(int option, char *value, uint64_t size) {
    memset(value, 0, size);
    return 0;
}

int aclrtGetSysParamOpt(int option, int64_t *value) {
    *value = 0;
    return 0;
}

int aclrtSetSysParamOpt(int option, int64_t value) { return 0; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return 0; }
int aclopCompileAndExecuteV2(void) { return 500001; }
