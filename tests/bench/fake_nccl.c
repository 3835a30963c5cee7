/* A library with NCCL's names and the prototypes of nccl.h 2.28, for one rank on the CPU: it moves the bytes that one
 * rank would, and writes down every call with its arguments. Left out: more ranks, streams, reductions over them. */

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct {
  size_t size; unsigned int magic; unsigned int version;
  int blocking; int cgaClusterSize; int minCTAs; int maxCTAs; const char *netName; int splitShare; int trafficClass;
  const char *commName; int collnetEnable; int CTAPolicy; int shrinkShare; int nvlsCTAs; int nChannelsPerNetPeer;
  int nvlinkCentricSched;
} ncclConfig_t;
typedef void *Comm;
typedef void *Stream;

static char words[1 << 20];
static size_t used;
static int version = 22809, fail_at = -1, calls;
static int asynchronous_error;
static const void *pending[64];
static size_t first_pending, num_pending;

static int say(const char *format, ...) {
  va_list list;
  va_start(list, format);
  if (used < sizeof(words) - 512) used += (size_t)vsnprintf(words + used, 512, format, list);
  va_end(list);
  return calls++ == fail_at ? 5 : 0;
}

const char *fake_words(void) { return words; }
void fake_reset(int new_version, int new_fail_at) {
  version = new_version; fail_at = new_fail_at; used = 0; words[0] = 0; calls = 0; num_pending = first_pending = 0;
  asynchronous_error = 0;
}
void fake_asynchronous_error(int status) { asynchronous_error = status; }

static size_t width(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}

/* As NCCL, the log is opened at the first word after a reset, if NCCL_DEBUG asks for it. */
static void log_line(const char *subsystem, const char *line) {
  const char *level = getenv("NCCL_DEBUG"), *wanted = getenv("NCCL_DEBUG_SUBSYS"), *file = getenv("NCCL_DEBUG_FILE");
  if (!level || strcmp(level, "INFO") || !wanted || !strstr(wanted, subsystem) || !file) return;
  FILE *out = fopen(file, "a");
  if (out) { fprintf(out, "host:1:1 [0] NCCL INFO %s\n", line); fclose(out); }
}

static int move(const void *send, void *recv, size_t count, int type) {
  if (recv != send) memmove(recv, send, count * width(type));
  return 0;
}

void ncclResetDebugInit(void) {}
const char *ncclGetErrorString(int status) { return status == 5 ? "invalid usage" : "some error"; }
const char *ncclGetLastError(Comm comm) { (void)comm; return "the fake was told\nto fail"; }
int ncclGetVersion(int *found) { *found = version; return 0; }
int ncclGetUniqueId(ncclUniqueId *id) { memset(id, 'u', sizeof *id); return say("UniqueId\n"); }
int ncclCommInitRankConfig(Comm *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  *comm = (Comm)0xC0;
  log_line("INIT", "NVLS multicast support is not available on dev 0 (NVLS_NCHANNELS 0)");
  return say("Init nranks=%d id=%c%c rank=%d size=%zu magic=%x version=%u blocking=%d policy=%d central=%d name=%p\n",
             nranks, id.internal[0], id.internal[127], rank, config->size, config->magic, config->version,
             config->blocking, config->CTAPolicy, config->nvlinkCentricSched, (void *)config->netName);
}
int ncclCommDestroy(Comm comm) { return say("Destroy comm=%p\n", comm); }
int ncclCommAbort(Comm comm) { return say("Abort comm=%p\n", comm); }
int ncclCommGetAsyncError(Comm comm, int *error) { (void)comm; *error = asynchronous_error; return 0; }
int ncclMemAlloc(void **at, size_t size) {
  *at = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  return say("Alloc size=%zu\n", size);
}
int ncclMemFree(void *at) { free(at); return say("Free\n"); }
int ncclCommRegister(Comm comm, void *buffer, size_t size, void **handle) {
  *handle = (void *)0xB1; (void)buffer;
  return say("Register comm=%p size=%zu\n", comm, size);
}
int ncclCommDeregister(Comm comm, void *handle) { return say("Deregister comm=%p handle=%p\n", comm, handle); }
int ncclCommWindowRegister(Comm comm, void *buffer, size_t size, void **window, int flags) {
  *window = (void *)0xB2; (void)buffer;
  return say("Window comm=%p size=%zu flags=%d\n", comm, size, flags);
}
int ncclCommWindowDeregister(Comm comm, void *window) { return say("CloseWindow comm=%p window=%p\n", comm, window); }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm comm) {
  *op = 17;
  return say("PreMulSum first=%d type=%d residence=%d comm=%p\n", *(unsigned char *)scalar, type, residence, comm);
}
int ncclRedOpDestroy(int op, Comm comm) { return say("DestroyOp op=%d comm=%p\n", op, comm); }
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, Comm comm, Stream stream) {
  char line[128];
  snprintf(line, sizeof line, "AllReduce: %zu Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}", count * width(type));
  log_line("TUNING", line);
  move(send, recv, count, type);
  return say("AllReduce count=%zu type=%d op=%d comm=%p stream=%p\n", count, type, op, comm, stream);
}
int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, Comm comm, Stream stream) {
  move(send, recv, count, type);
  return say("ReduceScatter count=%zu type=%d op=%d comm=%p stream=%p\n", count, type, op, comm, stream);
}
int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root, Comm comm, Stream stream) {
  move(send, recv, count, type);
  return say("Reduce count=%zu type=%d op=%d root=%d comm=%p stream=%p\n", count, type, op, root, comm, stream);
}
int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, Comm comm, Stream stream) {
  move(send, recv, count, type);
  return say("Broadcast count=%zu type=%d root=%d comm=%p stream=%p\n", count, type, root, comm, stream);
}
int ncclAllGather(const void *send, void *recv, size_t count, int type, Comm comm, Stream stream) {
  move(send, recv, count, type);
  return say("AllGather count=%zu type=%d comm=%p stream=%p\n", count, type, comm, stream);
}
int ncclAlltoAll(const void *send, void *recv, size_t count, int type, Comm comm, Stream stream) {
  move(send, recv, count, type);
  return say("AlltoAll count=%zu type=%d comm=%p stream=%p\n", count, type, comm, stream);
}
int ncclGather(const void *send, void *recv, size_t count, int type, int root, Comm comm, Stream stream) {
  move(send, recv, count, type);
  return say("Gather count=%zu type=%d root=%d comm=%p stream=%p\n", count, type, root, comm, stream);
}
int ncclScatter(const void *send, void *recv, size_t count, int type, int root, Comm comm, Stream stream) {
  move(send, recv, count, type);
  return say("Scatter count=%zu type=%d root=%d comm=%p stream=%p\n", count, type, root, comm, stream);
}
int ncclSend(const void *send, size_t count, int type, int peer, Comm comm, Stream stream) {
  pending[num_pending++ % 64] = send;
  return say("Send count=%zu type=%d peer=%d comm=%p stream=%p\n", count, type, peer, comm, stream);
}
int ncclRecv(void *recv, size_t count, int type, int peer, Comm comm, Stream stream) {
  if (first_pending < num_pending) move(pending[first_pending++ % 64], recv, count, type);
  return say("Recv count=%zu type=%d peer=%d comm=%p stream=%p\n", count, type, peer, comm, stream);
}
int ncclGroupStart(void) { return say("GroupStart\n"); }
int ncclGroupEnd(void) { return say("GroupEnd\n"); }
