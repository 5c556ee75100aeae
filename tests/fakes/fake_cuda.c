/* SPDX-License-Identifier: MIT */
/*
 * A libcuda.so.1 with no GPU behind it. It is deliberately the worst lawful driver: whatever
 * the documentation leaves open happens late, and whatever it forbids is refused or written
 * down, so that code with a missing fence fails here on every run and not on one in a thousand.
 *
 *  1. A device pointer lies in a PROT_NONE range. The bytes live elsewhere and only a copy made
 *     through this file reaches them; a CPU load or store through a device pointer faults.
 *  2. Queued work runs when a fence is polled or waited for, never before, never on its own,
 *     and only as far as that fence demands. The source is read at that moment.
 *  3. Each stream is a FIFO. A stream that waits for an event pulls the other stream forward up
 *     to the place where the event was recorded when the wait was issued.
 *  4. Everything handed out is counted until it is given back; a misuse that the real driver
 *     would forgive or overlook is a recorded violation.
 *  5. A late error poisons its context: nothing more runs there, and every call reports it.
 *  6. One mutex covers all state, copies included; a sleep for an injected delay is outside it.
 *  7. A kernel is one of ours, known by its name, and its twin in C runs in its place, late like a
 *     copy. It may use host memory only that is registered and mapped for the device.
 *  8. A synchronous copy from memory that is not registered has read its source when it returns,
 *     and nothing more: the bytes arrive in the order of the legacy stream, late.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#include "base/coding.h"
#include "base/floats.h"

typedef int CUresult;
typedef int CUdevice;
typedef int CUdevice_attribute;
typedef int CUpointer_attribute;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef const struct kernel *CUfunction;
typedef struct { char bytes[16]; } CUuuid;
typedef void (*CUhostFn)(void *);

typedef struct {
	size_t srcXInBytes;
	size_t srcY;
	unsigned int srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	void *srcArray;
	size_t srcPitch;
	size_t dstXInBytes;
	size_t dstY;
	unsigned int dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	void *dstArray;
	size_t dstPitch;
	size_t WidthInBytes;
	size_t Height;
} CUDA_MEMCPY2D;

_Static_assert(sizeof(CUDA_MEMCPY2D) == 128, "CUDA_MEMCPY2D_v2 is 128 bytes on LP64");
_Static_assert(offsetof(CUDA_MEMCPY2D, dstHost) == 80, "CUDA_MEMCPY2D_v2 layout");

#define ERRORS(X) \
	X(CUDA_SUCCESS, 0) \
	X(CUDA_ERROR_INVALID_VALUE, 1) \
	X(CUDA_ERROR_OUT_OF_MEMORY, 2) \
	X(CUDA_ERROR_NOT_INITIALIZED, 3) \
	X(CUDA_ERROR_DEINITIALIZED, 4) \
	X(CUDA_ERROR_STUB_LIBRARY, 34) \
	X(CUDA_ERROR_DEVICE_UNAVAILABLE, 46) \
	X(CUDA_ERROR_NO_DEVICE, 100) \
	X(CUDA_ERROR_INVALID_DEVICE, 101) \
	X(CUDA_ERROR_INVALID_IMAGE, 200) \
	X(CUDA_ERROR_INVALID_CONTEXT, 201) \
	X(CUDA_ERROR_MAP_FAILED, 205) \
	X(CUDA_ERROR_NO_BINARY_FOR_GPU, 209) \
	X(CUDA_ERROR_ECC_UNCORRECTABLE, 214) \
	X(CUDA_ERROR_OPERATING_SYSTEM, 304) \
	X(CUDA_ERROR_INVALID_HANDLE, 400) \
	X(CUDA_ERROR_NOT_FOUND, 500) \
	X(CUDA_ERROR_NOT_READY, 600) \
	X(CUDA_ERROR_ILLEGAL_ADDRESS, 700) \
	X(CUDA_ERROR_LAUNCH_TIMEOUT, 702) \
	X(CUDA_ERROR_MISALIGNED_ADDRESS, 716) \
	X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709) \
	X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712) \
	X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713) \
	X(CUDA_ERROR_LAUNCH_FAILED, 719) \
	X(CUDA_ERROR_NOT_PERMITTED, 800) \
	X(CUDA_ERROR_NOT_SUPPORTED, 801) \
	X(CUDA_ERROR_SYSTEM_NOT_READY, 802) \
	X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803) \
	X(CUDA_ERROR_TIMEOUT, 909) \
	X(CUDA_ERROR_UNKNOWN, 999)

enum {
#define X(name, value) name = value,
	ERRORS(X)
#undef X
};

#define FUNCTIONS(X) \
	X(cuInit) \
	X(cuDriverGetVersion) \
	X(cuDeviceGetCount) \
	X(cuDeviceGet) \
	X(cuDeviceGetName) \
	X(cuDeviceGetUuid_v2) \
	X(cuDeviceGetAttribute) \
	X(cuDeviceGetPCIBusId) \
	X(cuDeviceGetByPCIBusId) \
	X(cuDeviceTotalMem_v2) \
	X(cuDevicePrimaryCtxRetain) \
	X(cuDevicePrimaryCtxRelease_v2) \
	X(cuDevicePrimaryCtxGetState) \
	X(cuCtxSetCurrent) \
	X(cuCtxGetCurrent) \
	X(cuCtxPushCurrent_v2) \
	X(cuCtxPopCurrent_v2) \
	X(cuCtxGetDevice) \
	X(cuCtxGetStreamPriorityRange) \
	X(cuCtxSynchronize) \
	X(cuMemAlloc_v2) \
	X(cuMemFree_v2) \
	X(cuMemGetInfo_v2) \
	X(cuMemHostRegister_v2) \
	X(cuMemHostUnregister) \
	X(cuMemHostGetDevicePointer_v2) \
	X(cuMemcpyHtoDAsync_v2) \
	X(cuMemcpyDtoHAsync_v2) \
	X(cuMemcpyDtoDAsync_v2) \
	X(cuMemcpy2DAsync_v2) \
	X(cuMemcpyHtoD_v2) \
	X(cuMemcpyDtoH_v2) \
	X(cuMemcpyDtoD_v2) \
	X(cuMemcpy2D_v2) \
	X(cuMemsetD8Async) \
	X(cuMemsetD8_v2) \
	X(cuStreamCreate) \
	X(cuStreamCreateWithPriority) \
	X(cuStreamDestroy_v2) \
	X(cuStreamSynchronize) \
	X(cuStreamQuery) \
	X(cuStreamWaitEvent) \
	X(cuLaunchHostFunc) \
	X(cuModuleLoadData) \
	X(cuModuleUnload) \
	X(cuModuleGetFunction) \
	X(cuLaunchKernel) \
	X(cuEventCreate) \
	X(cuEventDestroy_v2) \
	X(cuEventRecord) \
	X(cuEventRecordWithFlags) \
	X(cuEventQuery) \
	X(cuEventSynchronize) \
	X(cuPointerGetAttribute) \
	X(cuPointerGetAttributes) \
	X(cuGetErrorName) \
	X(cuGetErrorString) \
	X(cuGetProcAddress_v2)

enum fn {
#define X(name) FN_##name,
	FUNCTIONS(X)
#undef X
	FN_COUNT
};

static const char *const fn_names[FN_COUNT] = {
#define X(name) #name,
	FUNCTIONS(X)
#undef X
};

/*
 * These names also exist in the real library, with the calling convention of 2010 (32-bit sizes
 * and pointers). Code that looks up the bare name links, runs and misbehaves; here it is told.
 */
#define OLD_NAMES(X) \
	X(cuDeviceTotalMem) \
	X(cuDevicePrimaryCtxRelease) \
	X(cuCtxPushCurrent) \
	X(cuCtxPopCurrent) \
	X(cuMemAlloc) \
	X(cuMemFree) \
	X(cuMemGetInfo) \
	X(cuMemHostRegister) \
	X(cuMemHostGetDevicePointer) \
	X(cuMemcpyHtoDAsync) \
	X(cuMemcpyDtoHAsync) \
	X(cuMemcpyDtoDAsync) \
	X(cuMemcpy2DAsync) \
	X(cuMemcpyHtoD) \
	X(cuMemcpyDtoH) \
	X(cuMemcpyDtoD) \
	X(cuMemcpy2D) \
	X(cuMemsetD8) \
	X(cuStreamDestroy) \
	X(cuEventDestroy)

/* Declares, then opens the definition: there is no header, and -Wmissing-prototypes is fair. */
#define EXPORT __attribute__((visibility("default")))
#define API(name, ...) \
	EXPORT CUresult name(__VA_ARGS__); \
	EXPORT CUresult name(__VA_ARGS__)

#define DRIVER_VERSION		13000
#define MAX_DEVICES		4
#define MAX_PITCH		0x7fffffffUL
#define MAX_RULES		32
#define MAX_TEXTS		64
#define CTX_STACK		16
#define ALLOC_ALIGN		512UL
#define PAGE			4096UL
#define STREAM_TAG		0x5e00000000000000UL
#define EVENT_TAG		0x5d00000000000000UL
#define MODULE_TAG		0x5c00000000000000UL
#define FATBIN_MAGIC		0xba55ed50U
#define KERNEL_NUMBERS_MAX	(1 << 28)

#define MEMTYPE_HOST		1U
#define MEMTYPE_DEVICE		2U
#define MEMTYPE_UNIFIED		4U

#define REGISTER_DEVICEMAP	0x02U
#define REGISTER_IOMEMORY	0x04U
#define REGISTER_READ_ONLY	0x08U
#define REGISTER_ALL		0x0fU

#define STREAM_NON_BLOCKING	0x1U

#define NEED_INIT	1U
#define NEED_CTX	2U	/* implies NEED_INIT */
#define NEED_CLEAN	4U	/* refuse at once when the context carries a late error */
#define USABLE		(NEED_CTX | NEED_CLEAN)

struct context {
	int device;
	int refs;
	CUresult sticky;
	size_t null_stream;	/* index + 1, 0 before first use */
	unsigned long modules;	/* loaded */
};

enum op_kind { OP_COPY, OP_SET, OP_WAIT, OP_RECORD, OP_HOST };

/* One side of a copy. Device sides hold the handed-out address and are translated when run. */
struct side {
	bool host;
	uintptr_t at;
	size_t pitch;
	size_t width;		/* of a row, where that is not the copy's: of a kernel */
};

/* A kernel of src/kernels, and what it does to one number; or what it decodes. */
struct kernel {
	const char *name;
	size_t from_size, to_size;
	void (*change)(void *to, const void *from);
	unsigned int decodes;		/* number in coding_kernels + 1; 0: it does not */
};

#define KERNELS(X) \
	X(bf16_to_f16, floats_half, floats_half) \
	X(bf16_to_f32, floats_half, floats_single) \
	X(f16_to_bf16, floats_half, floats_half) \
	X(f16_to_f32, floats_half, floats_single) \
	X(f32_to_bf16, floats_single, floats_half) \
	X(f32_to_f16, floats_single, floats_half)

#define X(name, From, To) \
	static void change_##name(void *to, const void *from) \
	{ \
		*(To *)to = floats_##name(*(const From *)from); \
	}
KERNELS(X)
#undef X

static const struct kernel kernels[] = {
#define X(name, From, To) { "convert_" #name, sizeof(From), sizeof(To), change_##name, 0 },
	KERNELS(X)
#undef X
};

static struct kernel decoders[CODING_KERNELS];

struct op {
	struct op *next;
	uint64_t seq;
	enum op_kind kind;
	struct side dst, src;
	unsigned char *staged;	/* what the call took along: the source's bytes, or what a kernel
				   that decodes was told */
	size_t width, height;
	unsigned char value;
	bool poisoned;
	size_t wait_stream;
	uint64_t wait_seq;
	CUhostFn fn;
	void *argument;
	const struct kernel *kernel;	/* of a copy that one makes */
};

struct stream {
	struct context *ctx;
	size_t index;
	bool is_null;		/* the legacy default stream */
	bool implicit;		/* nobody created it: a default stream, legacy or a thread's */
	bool blocking, zombie;
	unsigned int polls_left;
	uint64_t last, done;
	struct op *head, **tail;
};

/* An event is a place in a stream. A stream that is gone counts as having reached every place. */
struct event {
	struct context *ctx;
	bool recorded;
	size_t stream;
	uint64_t seq;
	unsigned int polls_left;
};

struct alloc {
	uintptr_t at;
	size_t size, charged, mapped;
	unsigned char *bytes;
	struct context *ctx;
	unsigned long long id;
};

struct registration {
	uintptr_t at;
	size_t size;
	unsigned int flags;
	struct context *ctx;
};

struct rule {
	int fn;			/* FN_COUNT for rules about executed copies */
	bool every, onward;
	unsigned long nth;
	long value;
};

struct rules {
	struct rule r[MAX_RULES];
	int n;
};

static struct {
	size_t memory, poison;
	int devices, read_only_register;
	unsigned int polls, init_ms;
	bool strict, abort_on_leak;
	const char *report;
	struct rules fail, delay, fail_late, corrupt;
} cfg;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t owner;
static bool initialised, unloaded;
static struct context contexts[MAX_DEVICES];
static size_t used[MAX_DEVICES];

static void *range_base;
static uintptr_t range_at, range_end, range_cursor;
static struct alloc *allocs;		/* sorted by address, as are the registrations */
static size_t n_allocs, cap_allocs;
static struct registration *regs;
static size_t n_regs, cap_regs;
/* Handles are indices and are never reused, so that a stale handle is always seen as stale. */
static struct stream **streams;
static size_t n_streams, cap_streams;
static struct event **events;
static size_t n_events, cap_events;

static unsigned long calls[FN_COUNT];
static unsigned long executed, injected, pageable, pageable_sync, dropped, abandoned;
static unsigned long long next_id = 1, bytes_h2d, bytes_d2h, bytes_other;
static size_t registered, peak_registered;
static unsigned long violations;
static char *texts[MAX_TEXTS];

/* Told the context when a cuCtxSynchronize begins, with the mutex held. */
static void (*on_settle)(CUcontext);

static __thread struct {
	struct context *stack[CTX_STACK];
	int depth;
	size_t own_stream[MAX_DEVICES];	/* index + 1 of this thread's default streams */
} current;

/* ------------------------------------------------------------------ configuration */

/*
 * The environment is read once, at the first call. A malformed value ends the process with
 * status 98, since a test whose injection is silently ignored would pass for the wrong reason.
 */
static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fputs("fake_cuda: ", stderr);
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
	va_end(ap);
	fflush(NULL);
	_exit(98);
}

static void __attribute__((format(printf, 1, 2))) violate(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	if (violations < MAX_TEXTS && vasprintf(&texts[violations], fmt, ap) < 0)
		texts[violations] = NULL;
	violations++;
	va_end(ap);
}

static unsigned long env_number(const char *name, unsigned long fallback, unsigned long max)
{
	const char *s = getenv(name);
	unsigned long v;
	unsigned int shift = 0;
	char *end;

	if (!s || !*s)
		return fallback;
	errno = 0;
	v = strtoul(s, &end, 0);
	if (end != s && *end) {
		switch (toupper((unsigned char)*end)) {
		case 'K':
			shift = 10;
			break;
		case 'M':
			shift = 20;
			break;
		case 'G':
			shift = 30;
			break;
		default:
			die("%s: bad number '%s'", name, s);
		}
		end++;
	}
	if (end == s || *end || errno || *s == '-' || v > (max >> shift))
		die("%s: bad number '%s'", name, s);
	return v << shift;
}

static int fn_lookup(const char *s, size_t n)
{
	for (int i = 0; i < FN_COUNT; i++) {
		size_t full = strlen(fn_names[i]);

		if (n == full && !memcmp(s, fn_names[i], n))
			return i;
		if (full > 3 && fn_names[i][full - 3] == '_' && n == full - 3 &&
		    !memcmp(s, fn_names[i], n))
			return i;
	}
	return -1;
}

/* "[function:]nth[+][=value]", comma separated; nth is a count from 1 or '*'. */
static void env_rules(const char *name, struct rules *set, bool with_fn, bool with_value)
{
	const char *s = getenv(name);

	while (s && *s) {
		const char *stop = strchrnul(s, ',');
		struct rule r = { .fn = FN_COUNT };
		char *end;

		if (set->n == MAX_RULES)
			die("%s: more than %d rules", name, MAX_RULES);
		if (with_fn) {
			const char *colon = memchr(s, ':', (size_t)(stop - s));

			if (!colon)
				die("%s: no ':' in '%s'", name, s);
			r.fn = fn_lookup(s, (size_t)(colon - s));
			if (r.fn < 0)
				die("%s: unknown function in '%s'", name, s);
			s = colon + 1;
		}
		if (*s == '*') {
			r.every = true;
			s++;
		} else {
			if (!isdigit((unsigned char)*s))
				die("%s: bad count at '%s'", name, s);
			r.nth = strtoul(s, &end, 10);
			if (!r.nth)
				die("%s: counts start at 1", name);
			s = end;
			r.onward = *s == '+';
			s += r.onward;
		}
		if (with_value) {
			if (*s != '=' || !isdigit((unsigned char)s[1]))
				die("%s: no '=number' at '%s'", name, s);
			r.value = strtol(s + 1, &end, 10);
			if (r.value > INT_MAX)
				die("%s: number too large", name);
			s = end;
		}
		if (s != stop)
			die("%s: unexpected text at '%s'", name, s);
		set->r[set->n++] = r;
		s = *stop ? stop + 1 : stop;
	}
}

static void configure(void)
{
	cfg.memory = env_number("FAKE_CUDA_MEMORY", 2UL << 30, 1UL << 44);
	cfg.poison = env_number("FAKE_CUDA_POISON", 64UL << 20, 1UL << 44);
	cfg.devices = (int)env_number("FAKE_CUDA_DEVICES", 1, MAX_DEVICES);
	cfg.polls = (unsigned int)env_number("FAKE_CUDA_POLLS", 2, 1000000);
	cfg.init_ms = (unsigned int)env_number("FAKE_CUDA_INIT_MS", 0, 600000);
	cfg.strict = env_number("FAKE_CUDA_STRICT", 0, 1);
	cfg.read_only_register = (int)env_number("FAKE_CUDA_READ_ONLY_REGISTER", 1, 1);
	env_rules("FAKE_CUDA_FAIL", &cfg.fail, true, true);
	env_rules("FAKE_CUDA_DELAY", &cfg.delay, true, true);
	env_rules("FAKE_CUDA_FAIL_LATE", &cfg.fail_late, false, true);
	env_rules("FAKE_CUDA_CORRUPT", &cfg.corrupt, false, false);
}

static const struct rule *match(const struct rules *set, int fn, unsigned long nth)
{
	for (int i = 0; i < set->n; i++) {
		const struct rule *r = &set->r[i];

		if (r->fn == fn && (r->every || r->nth == nth || (r->onward && nth > r->nth)))
			return r;
	}
	return NULL;
}

/* ------------------------------------------------------------------ entry and exit */

static void sleep_ms(long ms)
{
	struct timespec ts = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L };

	while (nanosleep(&ts, &ts) && errno == EINTR)
		;
}

static CUresult leave(CUresult rc)
{
	pthread_mutex_unlock(&lock);
	return rc;
}

/*
 * Succeeds with the mutex held, fails with it free. Calls are counted even when refused, so
 * that "the third call" in a rule means what a reader of the caller's code would count.
 */
static CUresult enter(enum fn fn, unsigned int need, struct context **out)
{
	const struct rule *r;
	struct context *c = NULL;
	unsigned long nth;
	CUresult rc = CUDA_SUCCESS;

	pthread_once(&once, configure);
	pthread_mutex_lock(&lock);
	if (unloaded)
		return leave(CUDA_ERROR_DEINITIALIZED);
	nth = ++calls[fn];
	r = match(&cfg.delay, (int)fn, nth);
	if (r) {
		pthread_mutex_unlock(&lock);
		sleep_ms(r->value);
		pthread_mutex_lock(&lock);
	}
	r = match(&cfg.fail, (int)fn, nth);
	if (r) {
		injected++;
		rc = (CUresult)r->value;
		goto out;
	}
	/* A child of fork() has no driver state, whatever its parent had: as in the real one. */
	if ((need & (NEED_INIT | NEED_CTX)) && (!initialised || owner != getpid())) {
		rc = CUDA_ERROR_NOT_INITIALIZED;
		goto out;
	}
	if (need & NEED_CTX) {
		c = current.depth ? current.stack[current.depth - 1] : NULL;
		if (!c)
			rc = CUDA_ERROR_INVALID_CONTEXT;
		else if (!c->refs)
			rc = CUDA_ERROR_CONTEXT_IS_DESTROYED;
		else if (need & NEED_CLEAN)
			rc = c->sticky;
	}
out:
	if (rc != CUDA_SUCCESS) {
		pthread_mutex_unlock(&lock);
		return rc;
	}
	if (out)
		*out = c;
	return CUDA_SUCCESS;
}

#define ENTER(fn, need, ctx) \
	do { \
		CUresult enter_rc = enter(FN_##fn, need, ctx); \
		if (enter_rc != CUDA_SUCCESS) \
			return enter_rc; \
	} while (0)

/* Releasing calls do their work in a poisoned context too, but still report the error. */
static CUresult release_rc(const struct context *c, CUresult rc)
{
	return rc == CUDA_SUCCESS ? c->sticky : rc;
}

static void *grow(void *v, size_t *cap, size_t n, size_t item)
{
	if (n < *cap)
		return v;
	*cap = *cap ? *cap * 2 : 64;
	v = realloc(v, *cap * item);
	if (!v)
		die("out of host memory");
	return v;
}

/* ------------------------------------------------------------------ memory ranges */

static bool in_range(uintptr_t at, size_t n)
{
	return at < range_end && at + n > range_at;
}

/* Index of the last allocation that starts at or before the address, or -1. */
static ssize_t alloc_below(uintptr_t at)
{
	size_t lo = 0, hi = n_allocs;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (allocs[mid].at <= at)
			lo = mid + 1;
		else
			hi = mid;
	}
	return (ssize_t)lo - 1;
}

static struct alloc *alloc_find(uintptr_t at, size_t n)
{
	ssize_t i = alloc_below(at);
	struct alloc *a = i < 0 ? NULL : &allocs[i];

	if (!a || at - a->at >= a->size || n > a->size - (at - a->at))
		return NULL;
	return a;
}

/* Index of the first registration that ends after the address. */
static size_t reg_above(uintptr_t at)
{
	size_t lo = 0, hi = n_regs;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (regs[mid].at + regs[mid].size <= at)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

enum host_kind { HOST_PAGEABLE, HOST_REGISTERED, HOST_MIXED };

static enum host_kind host_kind(uintptr_t at, size_t n, const struct registration **found)
{
	size_t i = reg_above(at);

	if (i == n_regs || regs[i].at >= at + n)
		return HOST_PAGEABLE;
	if (regs[i].at > at || at + n > regs[i].at + regs[i].size)
		return HOST_MIXED;
	*found = &regs[i];
	return HOST_REGISTERED;
}

/* May a kernel use this host memory? Only what was registered to be mapped for the device is in its
 * address space by the driver's word. */
static bool kernel_reaches(uintptr_t at, size_t n, bool write)
{
	const struct registration *r;

	return host_kind(at, n, &r) == HOST_REGISTERED && (r->flags & REGISTER_DEVICEMAP) &&
	       !(write && (r->flags & REGISTER_READ_ONLY));
}

static bool still_mapped(uintptr_t at, size_t n)
{
	static unsigned char vec[16384];
	uintptr_t p = at & ~(PAGE - 1), end = (at + n + PAGE - 1) & ~(PAGE - 1);

	while (p < end) {
		size_t chunk = end - p;

		if (chunk > sizeof(vec) * PAGE)
			chunk = sizeof(vec) * PAGE;
		if (mincore((void *)p, chunk, vec) && errno == ENOMEM)
			return false;
		p += chunk;
	}
	return true;
}

/* mincore() cannot tell whether pages may be written, so registration reads the map itself. */
static bool map_allows(uintptr_t at, size_t n, bool write)
{
	FILE *f = fopen("/proc/self/maps", "re");
	uintptr_t want = at, end = at + n;
	char *line = NULL;
	size_t cap = 0;

	if (!f)
		die("/proc/self/maps: %s", strerror(errno));
	while (want < end && getline(&line, &cap, f) > 0) {
		unsigned long from, to;
		char prot[5];

		if (sscanf(line, "%lx-%lx %4s", &from, &to, prot) != 3)
			break;
		if (to <= want)
			continue;
		if (from > want || prot[0] != 'r' || (write && prot[1] != 'w'))
			break;
		want = to;
	}
	free(line);
	fclose(f);
	return want >= end;
}

static size_t side_width(const struct side *s, const struct op *op)
{
	return s->width ? s->width : op->width;
}

static bool side_touches(const struct side *s, const struct op *op, bool host, uintptr_t at,
			 size_t n)
{
	size_t span = (op->height - 1) * s->pitch + side_width(s, op);

	return s->host == host && s->at < at + n && at < s->at + span;
}

static bool op_touches(const struct op *op, bool host, uintptr_t at, size_t n)
{
	if (op->kind == OP_COPY && side_touches(&op->src, op, host, at, n))
		return true;
	return (op->kind == OP_COPY || op->kind == OP_SET) &&
	       side_touches(&op->dst, op, host, at, n);
}

/* ------------------------------------------------------------------ streams */

static struct stream *stream_at(size_t index)
{
	return index < n_streams ? streams[index] : NULL;
}

static struct stream *stream_new(struct context *c, unsigned int flags, bool implicit)
{
	struct stream *s = calloc(1, sizeof(*s));

	if (!s)
		die("out of host memory");
	streams = grow(streams, &cap_streams, n_streams, sizeof(*streams));
	s->ctx = c;
	s->index = n_streams;
	s->implicit = implicit;
	s->blocking = !(flags & STREAM_NON_BLOCKING);
	s->tail = &s->head;
	streams[n_streams++] = s;
	return s;
}

static struct stream *null_stream(struct context *c)
{
	struct stream *s;

	if (!c->null_stream) {
		s = stream_new(c, 0, true);
		s->is_null = true;
		c->null_stream = s->index + 1;
	}
	return streams[c->null_stream - 1];
}

/* The calling thread's default stream; it stands in order with the legacy one. */
static struct stream *thread_stream(struct context *c)
{
	size_t *own = &current.own_stream[c->device];

	/* One of a context that is gone went with it. */
	if (!*own || !stream_at(*own - 1))
		*own = stream_new(c, 0, true)->index + 1;
	return streams[*own - 1];
}

static CUstream stream_handle(const struct stream *s)
{
	return (CUstream)(STREAM_TAG | s->index << 4);
}

static CUresult stream_get(CUstream h, struct context *c, struct stream **out)
{
	uintptr_t v = (uintptr_t)h;
	struct stream *s;

	if (v <= 2) {		/* 0 and CU_STREAM_LEGACY are one, then CU_STREAM_PER_THREAD */
		*out = v == 2 ? thread_stream(c) : null_stream(c);
		return CUDA_SUCCESS;
	}
	s = (v & STREAM_TAG) == STREAM_TAG ? stream_at((v & ~STREAM_TAG) >> 4) : NULL;
	if (!s || s->zombie || s->implicit || v != (uintptr_t)stream_handle(s)) {
		violate("use of an invalid or destroyed stream %p", (void *)h);
		return CUDA_ERROR_INVALID_HANDLE;
	}
	*out = s;
	return CUDA_SUCCESS;
}

static void stream_push(struct stream *s, struct op op)
{
	struct op *o = malloc(sizeof(*o));

	if (!o)
		die("out of host memory");
	*o = op;
	o->next = NULL;
	o->seq = ++s->last;
	*s->tail = o;
	s->tail = &o->next;
	s->polls_left = cfg.polls;
}

static void push_wait(struct stream *s, const struct stream *on, uint64_t seq)
{
	stream_push(s, (struct op){ .kind = OP_WAIT, .wait_stream = on->index, .wait_seq = seq });
}

/*
 * The legacy null stream stands in order with every blocking stream of its context, both ways.
 * The zombies count: work in a destroyed stream is still work.
 */
static void enqueue(struct stream *s, struct op op)
{
	if (s->is_null) {
		for (size_t i = 0; i < n_streams; i++) {
			struct stream *o = streams[i];

			if (o && o != s && o->ctx == s->ctx && o->blocking && o->done < o->last)
				push_wait(s, o, o->last);
		}
	} else if (s->blocking && s->ctx->null_stream) {
		struct stream *o = streams[s->ctx->null_stream - 1];

		if (o->done < o->last)
			push_wait(s, o, o->last);
	}
	stream_push(s, op);
}

static unsigned char *translate(const struct side *s, size_t span)
{
	struct alloc *a;

	if (s->host)
		return (unsigned char *)s->at;
	a = alloc_find(s->at, span);
	return a ? a->bytes + (s->at - a->at) : NULL;
}

static void run_row(const struct op *op, unsigned char *dst, const unsigned char *src)
{
	const struct kernel *k = op->kernel;

	if (!k) {
		memmove(dst, src, op->width);
		return;
	}
	if (k->decodes) {
		const struct coding_kernel *decoder = &coding_kernels[k->decodes - 1];
		struct decode_launch *launch = (struct decode_launch *)(void *)op->staged;

		launch->to = dst;
		decode_run(launch, decoder->kind, form_of(decoder->form));
		return;
	}
	for (size_t i = 0; i < op->width / k->from_size; i++)
		k->change(dst + i * k->to_size, src + i * k->from_size);
}

static CUresult run_copy(const struct op *op)
{
	size_t dspan = (op->height - 1) * op->dst.pitch + side_width(&op->dst, op);
	size_t sspan = (op->height - 1) * op->src.pitch + side_width(&op->src, op);
	unsigned char *dst = translate(&op->dst, dspan);
	unsigned char *src = translate(&op->src, sspan);
	const struct rule *late = match(&cfg.fail_late, FN_COUNT, executed + 1);
	unsigned long long n = (unsigned long long)op->width * op->height;

	executed++;
	if (late) {
		injected++;
		return (CUresult)late->value;
	}
	if (op->poisoned || !dst || !src)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	if ((op->dst.host && !still_mapped(op->dst.at, dspan)) ||
	    (op->src.host && !still_mapped(op->src.at, sspan))) {
		violate("host memory of a queued copy was unmapped before the copy ran");
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	}
	for (size_t y = 0; y < op->height; y++)
		run_row(op, dst + y * op->dst.pitch, src + y * op->src.pitch);
	if (match(&cfg.corrupt, FN_COUNT, executed)) {
		injected++;
		dst[op->height / 2 * op->dst.pitch + side_width(&op->dst, op) / 2] ^= 0xff;
	}
	if (op->src.host && !op->dst.host)
		bytes_h2d += n;
	else if (op->dst.host && !op->src.host)
		bytes_d2h += n;
	else
		bytes_other += n;
	return CUDA_SUCCESS;
}

static void run_op(struct stream *s, const struct op *op)
{
	struct context *c = s->ctx;
	unsigned char *dst;

	if (c->sticky != CUDA_SUCCESS) {
		dropped += op->kind == OP_COPY;
		return;
	}
	if (op->kind == OP_COPY) {
		c->sticky = run_copy(op);
	} else if (op->kind == OP_SET) {
		dst = translate(&op->dst, op->width);
		if (dst && !op->poisoned)
			memset(dst, op->value, op->width);
		else
			c->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
	} else if (op->kind == OP_HOST) {
		op->fn(op->argument);
	}
}

/*
 * Runs a stream up to and including a place in it. A wait can only name work that was queued
 * earlier than itself, so the recursion ends and never comes back to a place not yet done.
 */
static void stream_run(struct stream *s, uint64_t seq)
{
	if (s->done >= seq)
		return;
	while (s->done < seq) {
		struct op *op = s->head;
		struct stream *on;

		s->head = op->next;
		if (!s->head)
			s->tail = &s->head;
		if (op->kind == OP_WAIT) {
			on = stream_at(op->wait_stream);
			if (on)
				stream_run(on, op->wait_seq);
		} else {
			run_op(s, op);
		}
		s->done = op->seq;
		free(op->staged);
		free(op);
	}
	if (s->zombie && !s->head) {
		streams[s->index] = NULL;
		free(s);
	}
}

static unsigned long stream_copies(const struct stream *s)
{
	unsigned long n = 0;

	for (const struct op *op = s->head; op; op = op->next)
		n += op->kind == OP_COPY;
	return n;
}

static unsigned long queued_copies(void)
{
	unsigned long n = 0;

	for (size_t i = 0; i < n_streams; i++)
		n += streams[i] ? stream_copies(streams[i]) : 0;
	return n;
}

static void stream_discard(struct stream *s)
{
	struct op *op, *next;

	for (op = s->head; op; op = next) {
		next = op->next;
		free(op->staged);
		free(op);
	}
	streams[s->index] = NULL;
	free(s);
}

static struct event *event_get(CUevent h)
{
	uintptr_t v = (uintptr_t)h;
	size_t i = (v & ~EVENT_TAG) >> 4;

	if ((v & EVENT_TAG) == EVENT_TAG && (v & 15) == 0 && i < n_events && events[i])
		return events[i];
	violate("use of an invalid or destroyed event %p", (void *)h);
	return NULL;
}

static bool event_done(const struct event *e)
{
	const struct stream *s = stream_at(e->stream);

	return !e->recorded || !s || s->done >= e->seq;
}

/* ------------------------------------------------------------------ start-up and devices */

API(cuInit, unsigned int flags)
{
	ENTER(cuInit, 0, NULL);
	if (flags)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (!cfg.devices)
		return leave(CUDA_ERROR_NO_DEVICE);
	if (!initialised) {
		size_t want = cfg.memory * (size_t)cfg.devices * 16 + (64UL << 30);
		void *p = MAP_FAILED;

		/* Under the mutex on purpose: a second caller waits for the first. */
		sleep_ms((long)cfg.init_ms);
		while (p == MAP_FAILED && want > cfg.memory) {
			p = mmap(NULL, want, PROT_NONE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
			if (p == MAP_FAILED)
				want /= 2;
		}
		if (p == MAP_FAILED)
			die("cannot reserve the device address range");
		range_base = p;
		range_at = range_cursor = ((uintptr_t)p + (2UL << 20) - 1) & ~((2UL << 20) - 1);
		range_end = (uintptr_t)p + want;
		for (int i = 0; i < cfg.devices; i++)
			contexts[i].device = i;
		owner = getpid();
		initialised = true;
	}
	return leave(owner == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED);
}

API(cuDriverGetVersion, int *version)
{
	ENTER(cuDriverGetVersion, 0, NULL);
	if (!version)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*version = DRIVER_VERSION;
	return leave(CUDA_SUCCESS);
}

API(cuDeviceGetCount, int *count)
{
	ENTER(cuDeviceGetCount, NEED_INIT, NULL);
	if (!count)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*count = cfg.devices;
	return leave(CUDA_SUCCESS);
}

static bool bad_device(CUdevice dev)
{
	return dev < 0 || dev >= cfg.devices;
}

API(cuDeviceGet, CUdevice *dev, int ordinal)
{
	ENTER(cuDeviceGet, NEED_INIT, NULL);
	if (!dev)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (bad_device(ordinal))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	*dev = ordinal;
	return leave(CUDA_SUCCESS);
}

API(cuDeviceGetName, char *name, int len, CUdevice dev)
{
	ENTER(cuDeviceGetName, NEED_INIT, NULL);
	if (!name || len <= 0)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (bad_device(dev))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	snprintf(name, (size_t)len, "Fake CUDA device %d", dev);
	return leave(CUDA_SUCCESS);
}

API(cuDeviceGetUuid_v2, CUuuid *uuid, CUdevice dev)
{
	ENTER(cuDeviceGetUuid_v2, NEED_INIT, NULL);
	if (!uuid)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (bad_device(dev))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	memset(uuid, 0xfa, sizeof(*uuid));
	uuid->bytes[15] = (char)dev;
	return leave(CUDA_SUCCESS);
}

API(cuDeviceGetAttribute, int *value, CUdevice_attribute attrib, CUdevice dev)
{
	ENTER(cuDeviceGetAttribute, NEED_INIT, NULL);
	if (!value || attrib <= 0 || attrib > 147)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (bad_device(dev))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	switch (attrib) {
	case 11:	/* MAX_PITCH */
		*value = (int)MAX_PITCH;
		break;
	case 15:	/* GPU_OVERLAP */
	case 19:	/* CAN_MAP_HOST_MEMORY */
	case 41:	/* UNIFIED_ADDRESSING */
	case 91:	/* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
	case 99:	/* HOST_REGISTER_SUPPORTED */
		*value = 1;
		break;
	case 33:	/* PCI_BUS_ID; the PCI device and domain are 0 */
		*value = 0x10 + dev;
		break;
	case 40:	/* ASYNC_ENGINE_COUNT */
		*value = 2;
		break;
	case 75:	/* COMPUTE_CAPABILITY_MAJOR */
		*value = 9;
		break;
	case 113:	/* READ_ONLY_HOST_REGISTER_SUPPORTED */
		*value = cfg.read_only_register;
		break;
	default:
		*value = 0;
	}
	return leave(CUDA_SUCCESS);
}

API(cuDeviceGetPCIBusId, char *id, int len, CUdevice dev)
{
	ENTER(cuDeviceGetPCIBusId, NEED_INIT, NULL);
	if (!id || len < 13)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (bad_device(dev))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	snprintf(id, (size_t)len, "0000:%02X:00.0", 0x10 + dev);
	return leave(CUDA_SUCCESS);
}

API(cuDeviceGetByPCIBusId, CUdevice *dev, const char *id)
{
	unsigned int domain = 0, bus, device, function = 0;

	ENTER(cuDeviceGetByPCIBusId, NEED_INIT, NULL);
	if (!dev || !id)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (sscanf(id, "%x:%x:%x.%x", &domain, &bus, &device, &function) < 3)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (domain || device || function || bus < 0x10 || bad_device((int)(bus - 0x10)))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	*dev = (int)(bus - 0x10);
	return leave(CUDA_SUCCESS);
}

API(cuDeviceTotalMem_v2, size_t *bytes, CUdevice dev)
{
	ENTER(cuDeviceTotalMem_v2, NEED_INIT, NULL);
	if (!bytes)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (bad_device(dev))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	*bytes = cfg.memory;
	return leave(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------ contexts */

API(cuDevicePrimaryCtxRetain, CUcontext *out, CUdevice dev)
{
	ENTER(cuDevicePrimaryCtxRetain, NEED_INIT, NULL);
	if (!out)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (bad_device(dev))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	contexts[dev].refs++;
	*out = (CUcontext)&contexts[dev];
	return leave(CUDA_SUCCESS);
}

static void alloc_remove(size_t i)
{
	munmap(allocs[i].bytes, allocs[i].mapped);
	used[allocs[i].ctx->device] -= allocs[i].charged;
	memmove(&allocs[i], &allocs[i + 1], (--n_allocs - i) * sizeof(*allocs));
}

static void reg_remove(size_t i)
{
	registered -= regs[i].size;
	memmove(&regs[i], &regs[i + 1], (--n_regs - i) * sizeof(*regs));
}

/* The driver frees all of it; for a test, what the last release had to free was leaked. */
static void context_destroy(struct context *c)
{
	unsigned long na = 0, nr = 0, ns = 0, ne = 0, nc = 0;

	for (size_t i = n_streams; i-- > 0;) {
		struct stream *s = streams[i];

		if (!s || s->ctx != c)
			continue;
		nc += stream_copies(s);
		ns += !s->implicit && !s->zombie;
		stream_discard(s);
	}
	for (size_t i = n_allocs; i-- > 0;) {
		if (allocs[i].ctx == c) {
			alloc_remove(i);
			na++;
		}
	}
	for (size_t i = n_regs; i-- > 0;) {
		if (regs[i].ctx == c) {
			reg_remove(i);
			nr++;
		}
	}
	for (size_t i = 0; i < n_events; i++) {
		if (events[i] && events[i]->ctx == c) {
			free(events[i]);
			events[i] = NULL;
			ne++;
		}
	}
	abandoned += nc;
	if (na + nr + ns + ne + nc + c->modules)
		violate("context of device %d released with %lu allocations, %lu registrations, "
			"%lu streams, %lu events, %lu queued copies, %lu modules",
			c->device, na, nr, ns, ne, nc, c->modules);
	c->modules = 0;
	c->sticky = CUDA_SUCCESS;
	c->null_stream = 0;
}

API(cuDevicePrimaryCtxRelease_v2, CUdevice dev)
{
	ENTER(cuDevicePrimaryCtxRelease_v2, NEED_INIT, NULL);
	if (bad_device(dev))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	if (!contexts[dev].refs) {
		violate("primary context of device %d released more often than retained", dev);
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	}
	if (!--contexts[dev].refs)
		context_destroy(&contexts[dev]);
	return leave(CUDA_SUCCESS);
}

API(cuDevicePrimaryCtxGetState, CUdevice dev, unsigned int *flags, int *active)
{
	ENTER(cuDevicePrimaryCtxGetState, NEED_INIT, NULL);
	if (!flags || !active)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (bad_device(dev))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	*flags = 0;
	*active = contexts[dev].refs > 0;
	return leave(CUDA_SUCCESS);
}

static struct context *context_get(CUcontext h)
{
	for (int i = 0; i < cfg.devices; i++) {
		if (h == (CUcontext)&contexts[i])
			return contexts[i].refs ? &contexts[i] : NULL;
	}
	return NULL;
}

API(cuCtxSetCurrent, CUcontext h)
{
	struct context *c;

	ENTER(cuCtxSetCurrent, NEED_INIT, NULL);
	if (!h) {
		current.depth -= current.depth > 0;
		return leave(CUDA_SUCCESS);
	}
	c = context_get(h);
	if (!c)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	current.depth += !current.depth;
	current.stack[current.depth - 1] = c;
	return leave(CUDA_SUCCESS);
}

API(cuCtxGetCurrent, CUcontext *out)
{
	ENTER(cuCtxGetCurrent, NEED_INIT, NULL);
	if (!out)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = current.depth ? (CUcontext)current.stack[current.depth - 1] : NULL;
	return leave(CUDA_SUCCESS);
}

API(cuCtxPushCurrent_v2, CUcontext h)
{
	struct context *c;

	ENTER(cuCtxPushCurrent_v2, NEED_INIT, NULL);
	c = context_get(h);
	if (!c)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	if (current.depth == CTX_STACK) {
		violate("context stack of a thread is deeper than %d", CTX_STACK);
		return leave(CUDA_ERROR_INVALID_VALUE);
	}
	current.stack[current.depth++] = c;
	return leave(CUDA_SUCCESS);
}

API(cuCtxPopCurrent_v2, CUcontext *out)
{
	ENTER(cuCtxPopCurrent_v2, NEED_INIT, NULL);
	if (!current.depth)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	current.depth--;
	if (out)
		*out = (CUcontext)current.stack[current.depth];
	return leave(CUDA_SUCCESS);
}

API(cuCtxGetDevice, CUdevice *dev)
{
	struct context *c;

	ENTER(cuCtxGetDevice, NEED_CTX, &c);
	if (!dev)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*dev = c->device;
	return leave(CUDA_SUCCESS);
}

API(cuCtxGetStreamPriorityRange, int *least, int *greatest)
{
	ENTER(cuCtxGetStreamPriorityRange, NEED_CTX, NULL);
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return leave(CUDA_SUCCESS);
}

API(cuCtxSynchronize, void)
{
	struct context *c;

	ENTER(cuCtxSynchronize, USABLE, &c);
	/* First: what the streams bring about from here on need not be waited for any more. */
	if (on_settle)
		on_settle((CUcontext)c);
	for (size_t i = 0; i < n_streams; i++) {
		if (streams[i] && streams[i]->ctx == c)
			stream_run(streams[i], streams[i]->last);
	}
	return leave(c->sticky);
}

/* ------------------------------------------------------------------ device memory */

/*
 * Next fit: an address comes back into use only after the whole range has been walked, so a
 * stale device pointer nearly always points at nothing. One page at least lies between two.
 */
static bool range_free(uintptr_t at, size_t span)
{
	ssize_t i;

	if (at >= range_end || span > range_end - at)
		return false;
	i = alloc_below(at + span - 1);
	return i < 0 || allocs[i].at + allocs[i].mapped + PAGE <= at;
}

static uintptr_t range_take(size_t span)
{
	uintptr_t at = range_cursor;

	if (!range_free(at, span)) {
		at = range_at;
		for (size_t i = 0; i < n_allocs && !range_free(at, span); i++)
			at = allocs[i].at + allocs[i].mapped + PAGE;
		if (!range_free(at, span))
			return 0;
	}
	range_cursor = at + span;
	return at;
}

API(cuMemAlloc_v2, CUdeviceptr *out, size_t size)
{
	struct context *c;
	struct alloc a = { 0 };
	size_t i;

	ENTER(cuMemAlloc_v2, USABLE, &c);
	if (!out || !size)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (size > cfg.memory)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	a.size = size;
	a.charged = (size + ALLOC_ALIGN - 1) & ~(ALLOC_ALIGN - 1);
	a.mapped = (size + PAGE - 1) & ~(PAGE - 1);
	if (a.charged > cfg.memory - used[c->device])
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	a.at = range_take(a.mapped + PAGE);
	if (!a.at)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	a.bytes = mmap(NULL, a.mapped, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (a.bytes == MAP_FAILED)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	/* Zeros would let a copy that never happened pass for a file full of zeros. */
	memset(a.bytes, 0xa5, size < cfg.poison ? size : cfg.poison);
	a.ctx = c;
	a.id = next_id++;
	used[c->device] += a.charged;
	allocs = grow(allocs, &cap_allocs, n_allocs, sizeof(*allocs));
	i = (size_t)(alloc_below(a.at) + 1);
	memmove(&allocs[i + 1], &allocs[i], (n_allocs++ - i) * sizeof(*allocs));
	allocs[i] = a;
	*out = a.at;
	return leave(CUDA_SUCCESS);
}

/* The real call waits for work that uses the memory. So does this one, but it takes a note. */
static void settle(uintptr_t at, size_t n)
{
	unsigned long hits = 0;

	for (size_t i = 0; i < n_streams; i++) {
		struct stream *s = streams[i];
		uint64_t until = 0;

		for (struct op *op = s ? s->head : NULL; op; op = op->next) {
			if (op_touches(op, false, at, n)) {
				until = op->seq;
				hits++;
			}
		}
		if (until)
			stream_run(s, until);
	}
	if (hits)
		violate("cuMemFree of memory that %lu queued operations still use", hits);
}

API(cuMemFree_v2, CUdeviceptr ptr)
{
	struct context *c;
	ssize_t i;

	ENTER(cuMemFree_v2, NEED_CTX, &c);
	i = alloc_below((uintptr_t)ptr);
	if (i < 0 || allocs[i].at != ptr) {
		violate("cuMemFree of 0x%llx, which is not a live allocation", ptr);
		return leave(CUDA_ERROR_INVALID_VALUE);
	}
	settle(allocs[i].at, allocs[i].size);
	alloc_remove((size_t)i);
	return leave(release_rc(c, CUDA_SUCCESS));
}

API(cuMemGetInfo_v2, size_t *avail, size_t *total)
{
	struct context *c;

	ENTER(cuMemGetInfo_v2, USABLE, &c);
	if (!avail || !total)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*avail = cfg.memory - used[c->device];
	*total = cfg.memory;
	return leave(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------ host registration */

API(cuMemHostRegister_v2, void *p, size_t size, unsigned int flags)
{
	struct context *c;
	uintptr_t at = (uintptr_t)p;
	size_t i;

	ENTER(cuMemHostRegister_v2, USABLE, &c);
	if (!p || !size || at + size < at || (flags & ~REGISTER_ALL) || in_range(at, size))
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (flags & REGISTER_IOMEMORY)
		return leave(CUDA_ERROR_NOT_SUPPORTED);
	if ((flags & REGISTER_READ_ONLY) && !cfg.read_only_register)
		return leave(CUDA_ERROR_NOT_SUPPORTED);
	i = reg_above(at);
	if (i < n_regs && regs[i].at < at + size)
		return leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	if (!map_allows(at, size, !(flags & REGISTER_READ_ONLY)))
		return leave(CUDA_ERROR_INVALID_VALUE);
	regs = grow(regs, &cap_regs, n_regs, sizeof(*regs));
	memmove(&regs[i + 1], &regs[i], (n_regs++ - i) * sizeof(*regs));
	regs[i] = (struct registration){ .at = at, .size = size, .flags = flags, .ctx = c };
	registered += size;
	if (registered > peak_registered)
		peak_registered = registered;
	return leave(CUDA_SUCCESS);
}

/*
 * Nothing promises that unregistering waits for the copies, and the owner is about to unmap the
 * memory. The copies must not run then: each becomes an illegal access, seen at its fence.
 */
API(cuMemHostUnregister, void *p)
{
	struct context *c;
	unsigned long hits = 0;
	size_t i;

	ENTER(cuMemHostUnregister, NEED_CTX, &c);
	if (!p)
		return leave(CUDA_ERROR_INVALID_VALUE);
	i = reg_above((uintptr_t)p);
	if (i == n_regs || regs[i].at != (uintptr_t)p)
		return leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	for (size_t k = 0; k < n_streams; k++) {
		for (struct op *op = streams[k] ? streams[k]->head : NULL; op; op = op->next) {
			if (op_touches(op, true, regs[i].at, regs[i].size)) {
				op->poisoned = true;
				hits++;
			}
		}
	}
	if (hits)
		violate("cuMemHostUnregister of memory that %lu queued copies still use", hits);
	reg_remove(i);
	return leave(release_rc(c, CUDA_SUCCESS));
}

API(cuMemHostGetDevicePointer_v2, CUdeviceptr *out, void *p, unsigned int flags)
{
	const struct registration *r;

	ENTER(cuMemHostGetDevicePointer_v2, USABLE, NULL);
	if (!out || !p || flags || host_kind((uintptr_t)p, 1, &r) != HOST_REGISTERED)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = (uintptr_t)p;
	return leave(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------ copies */

/* Checks one side when the copy is issued: that is where the real driver looks pointers up. */
static CUresult check_side(const struct side *s, size_t width, size_t height, bool is_dst,
			   bool *unregistered)
{
	const struct registration *r = NULL;
	size_t span;

	if (__builtin_mul_overflow(height - 1, s->pitch, &span) ||
	    __builtin_add_overflow(span, width, &span) || s->at + span < s->at || !s->at)
		return CUDA_ERROR_INVALID_VALUE;
	if (!s->host)
		return alloc_find(s->at, span) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	if (in_range(s->at, span))
		return CUDA_ERROR_INVALID_VALUE;
	switch (host_kind(s->at, span, &r)) {
	case HOST_MIXED:
		return CUDA_ERROR_INVALID_VALUE;
	case HOST_PAGEABLE:
		*unregistered = true;
		break;
	case HOST_REGISTERED:
		if (is_dst && (r->flags & REGISTER_READ_ONLY))
			return CUDA_ERROR_INVALID_VALUE;
		break;
	}
	return CUDA_SUCCESS;
}

/* Take the bytes of a source along, for a copy that runs when its owner may have changed them. */
static void stage(struct op *op)
{
	op->staged = malloc(op->width * op->height);
	if (!op->staged)
		die("out of host memory");
	for (size_t y = 0; y < op->height; y++)
		memcpy(op->staged + y * op->width,
		       (const unsigned char *)op->src.at + y * op->src.pitch, op->width);
	op->src.at = (uintptr_t)op->staged;
	op->src.pitch = op->width;
}

/*
 * Synchronous copies run before they return, but for those from pageable memory; they may use
 * that even in strict mode: they are what a test reads results back with. Device to device never
 * waits for the host.
 */
static CUresult submit_copy(struct context *c, CUstream h, struct op op, bool sync)
{
	bool unregistered = false;
	struct stream *s;
	CUresult rc = stream_get(h, c, &s);

	if (rc == CUDA_SUCCESS && op.width && op.height) {
		rc = check_side(&op.dst, op.width, op.height, true, &unregistered);
		if (rc == CUDA_SUCCESS)
			rc = check_side(&op.src, op.width, op.height, false, &unregistered);
	}
	if (rc != CUDA_SUCCESS || !op.width || !op.height)
		return leave(rc);
	if (unregistered && cfg.strict && !sync)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (s->ctx->sticky != CUDA_SUCCESS)
		return leave(s->ctx->sticky);
	pageable += unregistered && !sync;
	pageable_sync += unregistered && sync;
	op.kind = OP_COPY;
	if (unregistered && sync && op.src.host && !op.dst.host) {
		stage(&op);
		enqueue(s, op);
		return leave(CUDA_SUCCESS);
	}
	enqueue(s, op);
	if (unregistered || (sync && (op.dst.host || op.src.host))) {
		c = s->ctx;
		stream_run(s, s->last);
		rc = c->sticky;
	}
	return leave(rc);
}

static struct op flat(bool dst_host, uintptr_t dst, bool src_host, uintptr_t src, size_t n)
{
	return (struct op){
		.dst = { .host = dst_host, .at = dst, .pitch = n },
		.src = { .host = src_host, .at = src, .pitch = n },
		.width = n,
		.height = 1,
	};
}

API(cuMemcpyHtoDAsync_v2, CUdeviceptr dst, const void *src, size_t n, CUstream stream)
{
	struct context *c;

	ENTER(cuMemcpyHtoDAsync_v2, USABLE, &c);
	return submit_copy(c, stream, flat(false, dst, true, (uintptr_t)src, n), false);
}

API(cuMemcpyDtoHAsync_v2, void *dst, CUdeviceptr src, size_t n, CUstream stream)
{
	struct context *c;

	ENTER(cuMemcpyDtoHAsync_v2, USABLE, &c);
	return submit_copy(c, stream, flat(true, (uintptr_t)dst, false, src, n), false);
}

API(cuMemcpyDtoDAsync_v2, CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream)
{
	struct context *c;

	ENTER(cuMemcpyDtoDAsync_v2, USABLE, &c);
	return submit_copy(c, stream, flat(false, dst, false, src, n), false);
}

API(cuMemcpyHtoD_v2, CUdeviceptr dst, const void *src, size_t n)
{
	struct context *c;

	ENTER(cuMemcpyHtoD_v2, USABLE, &c);
	return submit_copy(c, NULL, flat(false, dst, true, (uintptr_t)src, n), true);
}

API(cuMemcpyDtoH_v2, void *dst, CUdeviceptr src, size_t n)
{
	struct context *c;

	ENTER(cuMemcpyDtoH_v2, USABLE, &c);
	return submit_copy(c, NULL, flat(true, (uintptr_t)dst, false, src, n), true);
}

API(cuMemcpyDtoD_v2, CUdeviceptr dst, CUdeviceptr src, size_t n)
{
	struct context *c;

	ENTER(cuMemcpyDtoD_v2, USABLE, &c);
	return submit_copy(c, NULL, flat(false, dst, false, src, n), true);
}

static CUresult make_side(struct side *s, unsigned int type, uintptr_t host, CUdeviceptr dev,
			  size_t x, size_t y, size_t pitch, const CUDA_MEMCPY2D *p)
{
	size_t need, skip;

	if (type == MEMTYPE_UNIFIED)
		*s = (struct side){ .host = !in_range((uintptr_t)dev, 1), .at = dev };
	else if (type == MEMTYPE_HOST)
		*s = (struct side){ .host = true, .at = host };
	else if (type == MEMTYPE_DEVICE)
		*s = (struct side){ .at = dev };
	else
		return CUDA_ERROR_INVALID_VALUE;
	s->pitch = pitch;
	if (__builtin_add_overflow(x, p->WidthInBytes, &need) || pitch > MAX_PITCH)
		return CUDA_ERROR_INVALID_VALUE;
	if (pitch < need && (p->Height > 1 || y || pitch))
		return CUDA_ERROR_INVALID_VALUE;
	if (__builtin_mul_overflow(y, pitch, &skip) || __builtin_add_overflow(skip, x, &skip) ||
	    __builtin_add_overflow(s->at, skip, &s->at))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

static CUresult submit_2d(struct context *c, CUstream stream, const CUDA_MEMCPY2D *p, bool sync)
{
	struct op op = { 0 };
	CUresult rc;

	if (!p)
		return leave(CUDA_ERROR_INVALID_VALUE);
	op.width = p->WidthInBytes;
	op.height = p->Height;
	rc = make_side(&op.dst, p->dstMemoryType, (uintptr_t)p->dstHost, p->dstDevice,
		       p->dstXInBytes, p->dstY, p->dstPitch, p);
	if (rc == CUDA_SUCCESS)
		rc = make_side(&op.src, p->srcMemoryType, (uintptr_t)p->srcHost, p->srcDevice,
			       p->srcXInBytes, p->srcY, p->srcPitch, p);
	return rc == CUDA_SUCCESS ? submit_copy(c, stream, op, sync) : leave(rc);
}

API(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D *p, CUstream stream)
{
	struct context *c;

	ENTER(cuMemcpy2DAsync_v2, USABLE, &c);
	return submit_2d(c, stream, p, false);
}

API(cuMemcpy2D_v2, const CUDA_MEMCPY2D *p)
{
	struct context *c;

	ENTER(cuMemcpy2D_v2, USABLE, &c);
	return submit_2d(c, NULL, p, true);
}

static CUresult submit_set(struct context *c, CUdeviceptr dst, unsigned char value, size_t n,
			   CUstream h)
{
	struct op op = flat(false, dst, false, 0, n);
	struct stream *s;
	CUresult rc = stream_get(h, c, &s);

	if (rc != CUDA_SUCCESS || !n)
		return leave(rc);
	if (!alloc_find((uintptr_t)dst, n))
		return leave(CUDA_ERROR_INVALID_VALUE);
	op.kind = OP_SET;
	op.value = value;
	enqueue(s, op);
	return leave(CUDA_SUCCESS);
}

API(cuMemsetD8Async, CUdeviceptr dst, unsigned char value, size_t n, CUstream stream)
{
	struct context *c;

	ENTER(cuMemsetD8Async, USABLE, &c);
	return submit_set(c, dst, value, n, stream);
}

/* Despite its name the plain form does not wait for the device either. */
API(cuMemsetD8_v2, CUdeviceptr dst, unsigned char value, size_t n)
{
	struct context *c;

	ENTER(cuMemsetD8_v2, USABLE, &c);
	return submit_set(c, dst, value, n, NULL);
}

/* ------------------------------------------------------------------ streams and events */

static CUresult stream_create(struct context *c, CUstream *out, unsigned int flags)
{
	if (!out || (flags & ~STREAM_NON_BLOCKING))
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = stream_handle(stream_new(c, flags, false));
	return leave(CUDA_SUCCESS);
}

API(cuStreamCreate, CUstream *out, unsigned int flags)
{
	struct context *c;

	ENTER(cuStreamCreate, USABLE, &c);
	return stream_create(c, out, flags);
}

API(cuStreamCreateWithPriority, CUstream *out, unsigned int flags, int priority)
{
	struct context *c;

	(void)priority;		/* out-of-range priorities are clamped, so any value will do */
	ENTER(cuStreamCreateWithPriority, USABLE, &c);
	return stream_create(c, out, flags);
}

API(cuStreamDestroy_v2, CUstream h)
{
	struct context *c;
	struct stream *s;
	CUresult rc;

	ENTER(cuStreamDestroy_v2, NEED_CTX, &c);
	if ((uintptr_t)h <= 2)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	rc = stream_get(h, c, &s);
	if (rc != CUDA_SUCCESS)
		return leave(rc);
	/* Its work outlives it, exactly as late as before: only the handle is gone. */
	s->zombie = true;
	if (!s->head)
		stream_discard(s);
	return leave(release_rc(c, CUDA_SUCCESS));
}

/* The null stream is not idle while a blocking stream of its context is not. */
static bool stream_pending(const struct stream *s)
{
	for (size_t i = 0; s->is_null && i < n_streams; i++) {
		const struct stream *o = streams[i];

		if (o && o->ctx == s->ctx && o->blocking && o->done < o->last)
			return true;
	}
	return s->done < s->last;
}

static CUresult stream_settle(struct stream *s)
{
	if (s->is_null && stream_pending(s))
		enqueue(s, (struct op){ .kind = OP_RECORD });
	stream_run(s, s->last);
	return leave(s->ctx->sticky);
}

API(cuStreamSynchronize, CUstream h)
{
	struct context *c;
	struct stream *s;
	CUresult rc;

	ENTER(cuStreamSynchronize, USABLE, &c);
	rc = stream_get(h, c, &s);
	return rc == CUDA_SUCCESS ? stream_settle(s) : leave(rc);
}

API(cuStreamQuery, CUstream h)
{
	struct context *c;
	struct stream *s;
	CUresult rc;

	ENTER(cuStreamQuery, USABLE, &c);
	rc = stream_get(h, c, &s);
	if (rc != CUDA_SUCCESS)
		return leave(rc);
	if (stream_pending(s) && s->polls_left) {
		s->polls_left--;
		return leave(CUDA_ERROR_NOT_READY);
	}
	return stream_settle(s);
}

API(cuStreamWaitEvent, CUstream h, CUevent eh, unsigned int flags)
{
	struct context *c;
	struct stream *s;
	struct event *e;
	CUresult rc;

	ENTER(cuStreamWaitEvent, USABLE, &c);
	if (flags > 1)
		return leave(CUDA_ERROR_INVALID_VALUE);
	rc = stream_get(h, c, &s);
	e = event_get(eh);
	if (rc != CUDA_SUCCESS || !e)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (!event_done(e))
		push_wait(s, stream_at(e->stream), e->seq);
	return leave(CUDA_SUCCESS);
}

/* As in the real driver the function must call nothing of this library: the mutex is held. */
API(cuLaunchHostFunc, CUstream h, CUhostFn fn, void *argument)
{
	struct context *c;
	struct stream *s;
	CUresult rc;

	ENTER(cuLaunchHostFunc, USABLE, &c);
	rc = stream_get(h, c, &s);
	if (rc != CUDA_SUCCESS || !fn)
		return leave(rc != CUDA_SUCCESS ? rc : CUDA_ERROR_INVALID_VALUE);
	enqueue(s, (struct op){ .kind = OP_HOST, .fn = fn, .argument = argument });
	return leave(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------ kernels */

API(cuModuleLoadData, CUmodule *out, const void *image)
{
	struct context *c;
	uint32_t magic;

	ENTER(cuModuleLoadData, USABLE, &c);
	if (!out || !image || (uintptr_t)image % 8)
		return leave(CUDA_ERROR_INVALID_VALUE);
	memcpy(&magic, image, sizeof(magic));
	if (magic != FATBIN_MAGIC)
		return leave(CUDA_ERROR_INVALID_IMAGE);
	c->modules++;
	*out = (CUmodule)(MODULE_TAG | (unsigned long)c->device);
	return leave(CUDA_SUCCESS);
}

static bool bad_module(const struct context *c, CUmodule module)
{
	return !c->modules || module != (CUmodule)(MODULE_TAG | (unsigned long)c->device);
}

API(cuModuleUnload, CUmodule module)
{
	struct context *c;

	ENTER(cuModuleUnload, NEED_CTX, &c);
	if (bad_module(c, module)) {
		violate("unload of an invalid module %p", (void *)module);
		return leave(CUDA_ERROR_INVALID_HANDLE);
	}
	c->modules--;
	return leave(release_rc(c, CUDA_SUCCESS));
}

API(cuModuleGetFunction, CUfunction *out, CUmodule module, const char *name)
{
	struct context *c;

	ENTER(cuModuleGetFunction, USABLE, &c);
	if (!out || !name || bad_module(c, module))
		return leave(CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
		if (!strcmp(kernels[i].name, name)) {
			*out = &kernels[i];
			return leave(CUDA_SUCCESS);
		}
	}
	for (unsigned int i = 0; i < CODING_KERNELS; i++) {
		if (!strcmp(coding_kernels[i].name, name)) {
			decoders[i] = (struct kernel){ .name = name, .decodes = i + 1 };
			*out = &decoders[i];
			return leave(CUDA_SUCCESS);
		}
	}
	return leave(CUDA_ERROR_NOT_FOUND);
}

/* What a launch would do to memory; the real driver does not look, and the context is lost. */
static CUresult check_kernel(struct context *c, const struct op *op)
{
	const struct kernel *k = op->kernel;
	size_t sspan = (op->height - 1) * op->src.pitch + op->src.width;
	size_t dspan = (op->height - 1) * op->dst.pitch + op->dst.width;

	if (op->src.width / k->from_size > KERNEL_NUMBERS_MAX)
		violate("a kernel that counts in 32 bits was given too many numbers");
	else if (op->src.at % k->from_size || op->dst.at % k->to_size ||
		 (op->height > 1 && (op->src.pitch % k->from_size || op->dst.pitch % k->to_size)))
		violate("a kernel was given an address that is not aligned");
	else if (!kernel_reaches(op->src.at, sspan, false))
		violate("a kernel reads host memory that is not registered and mapped for it");
	else if (!alloc_find(op->dst.at, dspan))
		violate("a kernel writes outside of an allocation");
	else
		return CUDA_SUCCESS;
	c->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
	return CUDA_SUCCESS;
}

/* The bytes that a launch reads; 0 where what it was told of its chunks contradicts itself. */
static size_t decode_bytes(const struct decode_launch *launch, enum planes_kind kind)
{
	uint32_t bytes = 0;

	if (!launch->count || launch->count > DECODE_CHUNKS ||
	    (launch->values + PLANES_CHUNK - 1) / PLANES_CHUNK != launch->count)
		return 0;
	for (uint32_t i = 0; i < launch->count; i++) {
		const struct decode_chunk *known = &launch->chunks[i];
		uint32_t left = launch->values - i * PLANES_CHUNK;
		uint32_t count = left < PLANES_CHUNK ? left : PLANES_CHUNK;
		struct planes_chunk chunk = { .coded = known->coded,
					      .bytes = planes_plain(kind, count) };
		struct planes_parts parts;

		memcpy(chunk.escapes, known->escapes, sizeof(chunk.escapes));
		if (known->coded) {
			planes_parts(kind, count, chunk.escapes, &parts);
			chunk.bytes = parts.end;
		}
		if (known->at != bytes || !planes_check(kind, count, &chunk))
			return 0;
		bytes += chunk.bytes;
	}
	return bytes;
}

/* What a launch that decodes would do to memory. */
static CUresult check_decoder(struct context *c, struct op *op, const struct decode_launch *launch)
{
	const struct coding_kernel *decoder = &coding_kernels[op->kernel->decodes - 1];
	const struct form *form = form_of(decoder->form);
	size_t size = form ? form->to_size : planes_shapes[decoder->kind].bytes;

	op->src.at = (uintptr_t)launch->from;
	op->dst.at = (uintptr_t)launch->to;
	op->height = 1;
	op->width = op->src.width = decode_bytes(launch, decoder->kind);
	op->dst.width = (size_t)((launch->rows - 1) * launch->memory_pitch) +
			(size_t)launch->length * size;
	if (!op->width)
		violate("a kernel was told of chunks that contradict themselves");
	else if (op->src.at % 16 || op->dst.at % size || launch->memory_pitch % (long long)size)
		violate("a kernel was given an address that is not aligned");
	else if (!kernel_reaches(op->src.at, op->src.width, false) ||
		 !kernel_reaches((uintptr_t)launch->verdict, 4, true))
		violate("a kernel uses host memory that is not registered and mapped for it");
	else if (!alloc_find(op->dst.at, op->dst.width))
		violate("a kernel writes outside of an allocation");
	else
		return CUDA_SUCCESS;
	c->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
	return CUDA_SUCCESS;
}

/* A launch takes its arguments along. */
static CUresult launch_decoder(struct context *c, struct stream *s, struct op op,
			       const struct decode_launch *launch)
{
	CUresult rc = check_decoder(c, &op, launch);

	if (rc != CUDA_SUCCESS || c->sticky != CUDA_SUCCESS)
		return rc;
	op.staged = malloc(sizeof(*launch));
	if (!op.staged)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(op.staged, launch, sizeof(*launch));
	enqueue(s, op);
	return CUDA_SUCCESS;
}

API(cuLaunchKernel, CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
    unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, CUstream h,
    void **arguments, void **extra)
{
	struct context *c;
	struct stream *s;
	struct op op = { .kind = OP_COPY, .kernel = f, .src.host = true };
	CUresult rc;

	ENTER(cuLaunchKernel, USABLE, &c);
	rc = stream_get(h, c, &s);
	if (rc != CUDA_SUCCESS)
		return leave(rc);
	if (!f || !gx || !gy || gy > 65535 || gz != 1 || !bx || bx > 1024 || bx % 32 || by != 1 ||
	    bz != 1 || shared || !arguments || extra)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (f->decodes) {
		const struct decode_launch *launch = arguments[0];

		if (gx != launch->count || gy != 1 || bx != 32)
			return leave(CUDA_ERROR_INVALID_VALUE);
		return leave(launch_decoder(c, s, op, launch));
	}
	op.dst.at = *(uintptr_t *)arguments[0];
	op.src.at = *(uintptr_t *)arguments[1];
	op.width = (size_t)*(int *)arguments[2] * f->from_size;
	op.height = *(unsigned long long *)arguments[3];
	op.dst.pitch = *(unsigned long long *)arguments[4];
	op.src.pitch = *(unsigned long long *)arguments[5];
	op.src.width = op.width;
	op.dst.width = op.width / f->from_size * f->to_size;
	rc = check_kernel(c, &op);
	if (rc == CUDA_SUCCESS && c->sticky == CUDA_SUCCESS)
		enqueue(s, op);
	return leave(rc);
}

/* For the fake libcufile alone, whose copies in streams of its own end there; see on_settle. */
EXPORT void fake_cuda_on_settle(void (*fn)(CUcontext));
EXPORT void fake_cuda_on_settle(void (*fn)(CUcontext))
{
	pthread_mutex_lock(&lock);
	on_settle = fn;
	pthread_mutex_unlock(&lock);
}

/*
 * For the fake libcufile alone, and there only inside a function that cuLaunchHostFunc() or
 * on_settle runs: where the bytes of device memory really are, or NULL where there is no such
 * memory.
 */
EXPORT void *fake_cuda_reach(CUdeviceptr at, size_t n);
EXPORT void *fake_cuda_reach(CUdeviceptr at, size_t n)
{
	return translate(&(struct side){ .at = (uintptr_t)at }, n);
}

API(cuEventCreate, CUevent *out, unsigned int flags)
{
	struct context *c;
	struct event *e;

	ENTER(cuEventCreate, USABLE, &c);
	if (!out || flags > 7 || ((flags & 4) && !(flags & 2)))
		return leave(CUDA_ERROR_INVALID_VALUE);
	e = calloc(1, sizeof(*e));
	if (!e)
		die("out of host memory");
	e->ctx = c;
	events = grow(events, &cap_events, n_events, sizeof(*events));
	*out = (CUevent)(EVENT_TAG | n_events << 4);
	events[n_events++] = e;
	return leave(CUDA_SUCCESS);
}

API(cuEventDestroy_v2, CUevent h)
{
	struct context *c;
	struct event *e;

	ENTER(cuEventDestroy_v2, NEED_CTX, &c);
	e = event_get(h);
	if (!e)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	events[((uintptr_t)h & ~EVENT_TAG) >> 4] = NULL;
	free(e);
	return leave(release_rc(c, CUDA_SUCCESS));
}

/* The record is an entry of its own, so an event is never ready before it has been polled. */
static CUresult record(struct context *c, CUevent eh, CUstream h)
{
	struct stream *s;
	struct event *e = event_get(eh);
	CUresult rc = stream_get(h, c, &s);

	if (!e || rc != CUDA_SUCCESS || e->ctx != s->ctx)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	enqueue(s, (struct op){ .kind = OP_RECORD });
	e->recorded = true;
	e->stream = s->index;
	e->seq = s->last;
	e->polls_left = cfg.polls;
	return leave(CUDA_SUCCESS);
}

API(cuEventRecord, CUevent event, CUstream stream)
{
	struct context *c;

	ENTER(cuEventRecord, USABLE, &c);
	return record(c, event, stream);
}

API(cuEventRecordWithFlags, CUevent event, CUstream stream, unsigned int flags)
{
	struct context *c;

	ENTER(cuEventRecordWithFlags, USABLE, &c);
	if (flags)
		return leave(CUDA_ERROR_INVALID_VALUE);
	return record(c, event, stream);
}

static CUresult event_settle(struct event *e)
{
	if (!event_done(e))
		stream_run(stream_at(e->stream), e->seq);
	return leave(e->ctx->sticky);
}

API(cuEventQuery, CUevent h)
{
	struct event *e;

	ENTER(cuEventQuery, USABLE, NULL);
	e = event_get(h);
	if (!e)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (!event_done(e) && e->polls_left) {
		e->polls_left--;
		return leave(CUDA_ERROR_NOT_READY);
	}
	return event_settle(e);
}

API(cuEventSynchronize, CUevent h)
{
	struct event *e;

	ENTER(cuEventSynchronize, USABLE, NULL);
	e = event_get(h);
	return e ? event_settle(e) : leave(CUDA_ERROR_INVALID_HANDLE);
}

/* ------------------------------------------------------------------ questions */

static CUresult pointer_attribute(void *data, CUpointer_attribute which, uintptr_t at, bool lax)
{
	const struct alloc *a = alloc_find(at, 1);
	const struct registration *r = NULL;
	struct context *c;

	if (!a && host_kind(at, 1, &r) != HOST_REGISTERED && !lax)
		return CUDA_ERROR_INVALID_VALUE;
	c = a ? a->ctx : r ? r->ctx : NULL;
	switch (which) {
	case 1:		/* CONTEXT */
		*(CUcontext *)data = (CUcontext)c;
		break;
	case 2:		/* MEMORY_TYPE */
		*(unsigned int *)data = a ? MEMTYPE_DEVICE : r ? MEMTYPE_HOST : 0;
		break;
	case 3:		/* DEVICE_POINTER */
		*(CUdeviceptr *)data = c ? at : 0;
		break;
	case 4:		/* HOST_POINTER */
		*(void **)data = r ? (void *)at : NULL;
		return a && !lax ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	case 7:		/* BUFFER_ID */
		*(unsigned long long *)data = a ? a->id : 0;
		break;
	case 6:		/* SYNC_MEMOPS */
	case 8:		/* IS_MANAGED */
		*(unsigned int *)data = 0;
		break;
	case 9:		/* DEVICE_ORDINAL */
		*(int *)data = c ? c->device : -2;
		break;
	case 11:	/* RANGE_START_ADDR */
		*(CUdeviceptr *)data = a ? a->at : r ? r->at : 0;
		break;
	case 12:	/* RANGE_SIZE */
		*(size_t *)data = a ? a->size : r ? r->size : 0;
		break;
	case 13:	/* MAPPED */
		*(unsigned int *)data = c != NULL;
		break;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	return CUDA_SUCCESS;
}

API(cuPointerGetAttribute, void *data, CUpointer_attribute which, CUdeviceptr ptr)
{
	ENTER(cuPointerGetAttribute, NEED_INIT, NULL);
	if (!data)
		return leave(CUDA_ERROR_INVALID_VALUE);
	return leave(pointer_attribute(data, which, (uintptr_t)ptr, false));
}

API(cuPointerGetAttributes, unsigned int n, CUpointer_attribute *which, void **data,
    CUdeviceptr ptr)
{
	CUresult rc = CUDA_SUCCESS;

	ENTER(cuPointerGetAttributes, NEED_INIT, NULL);
	if (!n || !which || !data)
		return leave(CUDA_ERROR_INVALID_VALUE);
	for (unsigned int i = 0; i < n && rc == CUDA_SUCCESS; i++)
		rc = pointer_attribute(data[i], which[i], (uintptr_t)ptr, true);
	return leave(rc);
}

static const char *error_name(CUresult error)
{
	switch (error) {
#define X(name, value) \
	case value: \
		return #name;
	ERRORS(X)
#undef X
	default:
		return NULL;
	}
}

API(cuGetErrorName, CUresult error, const char **out)
{
	ENTER(cuGetErrorName, 0, NULL);
	if (!out)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = error_name(error);
	return leave(*out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

API(cuGetErrorString, CUresult error, const char **out)
{
	ENTER(cuGetErrorString, 0, NULL);
	if (!out)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = error_name(error);
	return leave(*out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

#define X(name) API(name, void) \
{ \
	pthread_once(&once, configure); \
	pthread_mutex_lock(&lock); \
	violate(#name " called by its old name, which has a 32-bit calling convention"); \
	return leave(CUDA_ERROR_INVALID_CONTEXT); \
}
OLD_NAMES(X)
#undef X

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);

API(cuGetProcAddress_v2, const char *name, void **out, int version, uint64_t flags, int *status)
{
	static void *const entry[FN_COUNT] = {
#define X(n) (void *)n,
		FUNCTIONS(X)
#undef X
	};
	size_t n = name ? strlen(name) : 0;
	int fn;

	ENTER(cuGetProcAddress_v2, 0, NULL);
	if (!name || !out || version > DRIVER_VERSION || flags > 2)
		return leave(CUDA_ERROR_INVALID_VALUE);
	/* Base names only, and a missing name is a success with a NULL: as the header has it. */
	fn = n > 3 && name[n - 3] == '_' && name[n - 2] == 'v' ? -1 : fn_lookup(name, n);
	*out = NULL;
	if (status)
		*status = fn < 0 ? 1 : version < 11040 ? 2 : 0;
	if (fn == FN_cuGetProcAddress_v2 && version >= 11030 && version < 12000) {
		*out = (void *)cuGetProcAddress;
		if (status)
			*status = 0;
	} else if (fn >= 0 && version >= 11040) {
		*out = entry[fn];
	}
	return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
	return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

/* ------------------------------------------------------------------ accounting */

struct tally {
	unsigned long allocs, regs, streams, events, modules, retained, queued;
	size_t alloc_bytes;
};

static struct tally take_stock(void)
{
	struct tally t = { .allocs = n_allocs, .regs = n_regs };

	for (size_t i = 0; i < n_allocs; i++)
		t.alloc_bytes += allocs[i].size;
	for (size_t i = 0; i < n_streams; i++)
		t.streams += streams[i] && !streams[i]->implicit && !streams[i]->zombie;
	for (size_t i = 0; i < n_events; i++)
		t.events += events[i] != NULL;
	for (int i = 0; i < MAX_DEVICES; i++) {
		t.retained += (unsigned long)contexts[i].refs;
		t.modules += contexts[i].modules;
	}
	t.queued = queued_copies() + abandoned;
	return t;
}

static unsigned long total(const struct tally *t)
{
	return t->allocs + t->regs + t->streams + t->events + t->modules + t->retained +
	       t->queued + violations;
}

static void write_text(FILE *f, const struct tally *t)
{
	fprintf(f, "allocations %lu (%zu bytes), registrations %lu (%zu bytes), streams %lu, "
		"events %lu, retained contexts %lu, queued copies %lu, violations %lu\n",
		t->allocs, t->alloc_bytes, t->regs, registered, t->streams, t->events,
		t->retained, t->queued, violations);
	for (unsigned long i = 0; i < violations && i < MAX_TEXTS; i++)
		fprintf(f, "violation: %s\n", texts[i] ? texts[i] : "?");
}

/* The number of things leaked, left queued or done wrong; 0 is what a clean program ends with. */
EXPORT int fake_cuda_leaks(char *text, size_t n);
EXPORT int fake_cuda_leaks(char *text, size_t n)
{
	struct tally t;
	FILE *f;

	pthread_mutex_lock(&lock);
	t = take_stock();
	if (text && n) {
		memset(text, 0, n);
		f = n > 1 ? fmemopen(text, n - 1, "w") : NULL;
		if (f) {
			write_text(f, &t);
			fclose(f);
		}
	}
	pthread_mutex_unlock(&lock);
	return total(&t) > INT_MAX ? INT_MAX : (int)total(&t);
}

/* How often a function was called, or any of them (NULL), since the library was loaded. */
EXPORT int fake_cuda_calls(const char *name);
EXPORT int fake_cuda_calls(const char *name)
{
	unsigned long count = 0;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < FN_COUNT; i++)
		if (!name || !strcmp(name, fn_names[i]))
			count += calls[i];
	pthread_mutex_unlock(&lock);
	return count > INT_MAX ? INT_MAX : (int)count;
}

/* "%p" in the path becomes the process id, for tests of several processes. */
static void write_report(const struct tally *t)
{
	const char *mark = strstr(cfg.report, "%p");
	bool first = true;
	char *path = NULL;
	FILE *f;

	if (mark ? asprintf(&path, "%.*s%d%s", (int)(mark - cfg.report), cfg.report,
			    (int)getpid(), mark + 2) < 0
		 : asprintf(&path, "%s", cfg.report) < 0)
		return;
	f = fopen(path, "we");
	if (!f) {
		fprintf(stderr, "fake_cuda: %s: %s\n", path, strerror(errno));
		free(path);
		return;
	}
	fprintf(f, "{\n\t\"leaks\": %lu,\n", total(t));
	fprintf(f, "\t\"live_allocations\": %lu,\n", t->allocs);
	fprintf(f, "\t\"live_allocation_bytes\": %zu,\n", t->alloc_bytes);
	fprintf(f, "\t\"live_registrations\": %lu,\n", t->regs);
	fprintf(f, "\t\"live_streams\": %lu,\n", t->streams);
	fprintf(f, "\t\"live_events\": %lu,\n", t->events);
	fprintf(f, "\t\"live_modules\": %lu,\n", t->modules);
	fprintf(f, "\t\"retained_contexts\": %lu,\n", t->retained);
	fprintf(f, "\t\"queued_copies\": %lu,\n", t->queued);
	fprintf(f, "\t\"executed_copies\": %lu,\n", executed);
	fprintf(f, "\t\"dropped_copies\": %lu,\n", dropped);
	fprintf(f, "\t\"injected\": %lu,\n", injected);
	fprintf(f, "\t\"bytes_h2d\": %llu,\n", bytes_h2d);
	fprintf(f, "\t\"bytes_d2h\": %llu,\n", bytes_d2h);
	fprintf(f, "\t\"bytes_other\": %llu,\n", bytes_other);
	fprintf(f, "\t\"pageable_copies\": %lu,\n", pageable);
	fprintf(f, "\t\"pageable_sync_copies\": %lu,\n", pageable_sync);
	fprintf(f, "\t\"registered_bytes\": %zu,\n", registered);
	fprintf(f, "\t\"peak_registered_bytes\": %zu,\n", peak_registered);
	fprintf(f, "\t\"violations\": %lu,\n\t\"violation_texts\": [", violations);
	for (unsigned long i = 0; i < violations && i < MAX_TEXTS; i++)
		fprintf(f, "%s\n\t\t\"%s\"", i ? "," : "", texts[i] ? texts[i] : "?");
	fprintf(f, "%s],\n\t\"calls\": {", violations ? "\n\t" : "");
	for (int i = 0; i < FN_COUNT; i++) {
		if (!calls[i])
			continue;
		fprintf(f, "%s\n\t\t\"%s\": %lu", first ? "" : ",", fn_names[i], calls[i]);
		first = false;
	}
	fprintf(f, "%s}\n}\n", first ? "" : "\n\t");
	fclose(f);
	free(path);
}

/* A child can always ask, whatever the parent's threads were at: it is told that it may not. */
static void child_of_fork(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

static void __attribute__((constructor)) fake_load(void)
{
	owner = getpid();
	pthread_atfork(NULL, NULL, child_of_fork);
	/* Needed even when no call is ever made, hence not left to the first call. */
	cfg.report = getenv("FAKE_CUDA_REPORT");
	cfg.abort_on_leak = env_number("FAKE_CUDA_ABORT_ON_LEAK", 0, 1);
}

/* A child of fork() inherits the books but owns nothing in them, so it neither tells nor ends. */
static void __attribute__((destructor)) fake_unload(void)
{
	struct tally t;

	if (owner != getpid())
		return;
	pthread_mutex_lock(&lock);
	t = take_stock();
	if (cfg.report && *cfg.report)
		write_report(&t);
	if (cfg.abort_on_leak && total(&t)) {
		fputs("fake_cuda: left behind: ", stderr);
		write_text(stderr, &t);
		fflush(NULL);
		_exit(99);
	}
	/* After dlclose() nothing points here any more, and a leak checker would say so. */
	unloaded = true;
	for (size_t i = 0; i < n_streams; i++) {
		if (streams[i])
			stream_discard(streams[i]);
	}
	for (size_t i = 0; i < n_events; i++)
		free(events[i]);
	while (n_allocs)
		alloc_remove(n_allocs - 1);
	for (int i = 0; i < MAX_TEXTS; i++)
		free(texts[i]);
	free(streams);
	free(events);
	free(allocs);
	free(regs);
	n_streams = n_events = n_allocs = n_regs = 0;
	if (range_base)
		munmap(range_base, range_end - (uintptr_t)range_base);
	pthread_mutex_unlock(&lock);
}
