/* Logs, dumps and profiles: torch_npu announces itself to them while it is imported, and nobody listens. */
#include <stddef.h>
#include <stdint.h>

void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...) {}
int aclmdlInitDump(void) { return 0; }
int aclmdlSetDump(const char *config) { return 0; }
int aclmdlFinalizeDump(void) { return 0; }
int32_t MsprofRegisterCallback(uint32_t module, void *callback) { return 0; }
int32_t MsprofReportApi(uint32_t aging, const void *api) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t aging, const void *data, uint32_t size) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t aging, const void *data, uint32_t size) { return 0; }
uint64_t MsprofGetHashId(const char *text, size_t size) { return 0; }
uint64_t MsprofSysCycleTime(void) { return 0; }
