/* SPDX-License-Identifier: MIT */
/*
 * A libcufile.so.0 with no GPUDirect Storage behind it. It really moves the bytes, between the
 * file and the memory of the fake libcuda, but at the last lawful moment, and it refuses or
 * writes down what the real library forbids.
 *
 *  1. A stream call moves its bytes when the stream is run by the fake libcuda, never before, and
 *     reads size and offsets through the caller's pointers at that moment.
 *  2. A batch entry moves its bytes when it is reported, never before.
 *  3. A descriptor is registered once at a time; a batch holds one submission of at most 128.
 *  4. Handles are numbers and are never reused, so a stale one is always seen as stale.
 *  5. `lock` is never held while libcuda is called: libcuda calls us with its own lock held.
 *  6. In compatibility mode a stream read tells its count when the stream runs it, but its bytes
 *     are in a buffer of ours then; they come to device memory, as if in a stream of ours, when
 *     somebody waits for the whole context. The real library (1.15) was seen to tell a count, and
 *     its stream to pass, before the bytes were there.
 *
 * The environment, read once, at the first call; a malformed value ends the process with 98:
 *   FAKE_CUFILE_FAIL            "cuFileRead:3=5013,stream-io:1+=5030,batch-entry:2=5": the k-th
 *                               call of a function ("k+": and all later ones, "*": all) fails
 *                               with a cuFile error or an errno; batch-entry and stream-io fail
 *                               late; a batch entry with 110 times out and tells no error
 *   FAKE_CUFILE_SHORT           "2,5": these transfers move half of what they should; "*": all
 *   FAKE_CUFILE_REGISTER_ERROR  every cuFileHandleRegister fails with this
 *   FAKE_CUFILE_DRIVER_ERROR    every cuFileDriverOpen fails with this
 *   FAKE_CUFILE_COMPAT          1 (default): no nvidia-fs, stream reads as in 6; 0: nvidia-fs
 *                               with NVMe
 *   FAKE_CUFILE_BATCH_SHUFFLE   1: batch entries end out of order and over several polls
 *   FAKE_CUFILE_REPORT          path of a JSON report written at exit; %p becomes the process id
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef void *CUstream;

typedef struct {
	int err;
	int cu_err;
} CUfileError_t;

typedef struct {
	unsigned int nvfs_major, nvfs_minor;
	size_t poll_thresh_size, max_direct_io_size;
	unsigned int dstatusflags, dcontrolflags;
	unsigned int fflags;
	unsigned int max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
	unsigned int max_batch_io_size, max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

typedef struct {
	int type;
	union {
		int fd;
		void *handle;
	} handle;
	const void *fs_ops;
} CUfileDescr_t;

typedef struct {
	int mode;
	union {
		struct {
			void *base;
			off_t file_offset;
			off_t base_offset;
			size_t size;
		} batch;
	} u;
	void *fh;
	int opcode;
	void *cookie;
} CUfileIOParams_t;

typedef struct {
	void *cookie;
	int status;
	size_t ret;
} CUfileIOEvents_t;

_Static_assert(sizeof(CUfileIOParams_t) == 64 && sizeof(CUfileIOEvents_t) == 24, "batch layout");
_Static_assert(sizeof(CUfileDrvProps_t) == 56 && sizeof(CUfileDescr_t) == 24, "layout");

#define FUNCTIONS(X)                                                                             \
	X(cuFileDriverOpen)                                                                      \
	X(cuFileDriverClose_v2)                                                                  \
	X(cuFileDriverGetProperties)                                                             \
	X(cuFileGetVersion)                                                                      \
	X(cuFileHandleRegister)                                                                  \
	X(cuFileHandleDeregister)                                                                \
	X(cuFileBufRegister)                                                                     \
	X(cuFileBufDeregister)                                                                   \
	X(cuFileRead)                                                                            \
	X(cuFileWrite)                                                                           \
	X(cuFileReadAsync)                                                                       \
	X(cuFileWriteAsync)                                                                      \
	X(cuFileStreamRegister)                                                                  \
	X(cuFileStreamDeregister)                                                                \
	X(cuFileBatchIOSetUp)                                                                    \
	X(cuFileBatchIOSubmit)                                                                   \
	X(cuFileBatchIOGetStatus)                                                                \
	X(cuFileBatchIOCancel)                                                                   \
	X(cuFileBatchIODestroy)

enum {
#define X(name) FN_##name,
	FUNCTIONS(X)
#undef X
	FN_BATCH_ENTRY,
	FN_STREAM_IO,
	FN_COUNT
};

static const char *const fn_names[FN_COUNT] = {
#define X(name) #name,
	FUNCTIONS(X)
#undef X
	"batch-entry",
	"stream-io",
};

enum {
	ERR_DRIVER = 5001, ERR_CUDA = 5011, ERR_POINTER = 5012, ERR_CONTEXT = 5015,
	ERR_RANGE = 5017, ERR_FILE_TYPE = 5018, ERR_VALUE = 5022, ERR_BUF_TWICE = 5023,
	ERR_BUF_UNKNOWN = 5024, ERR_OPEN_TWICE = 5026, ERR_UNREGISTERED = 5027,
	ERR_FILE_TWICE = 5028, ERR_NEWFD = 5031, ERR_BATCH_FULL = 5037,

	STATUS_CANCELED = 8, STATUS_COMPLETE = 16, STATUS_TIMEOUT = 32, STATUS_FAILED = 64,

	BATCH_LIMIT = 128, RULES_MAX = 32, TEXTS_MAX = 64, BOUNCE = 1 << 20,
	HANDLE_TAG = 0x6f000000, BATCH_TAG = 0x6b000000,
};

#define EXPORT __attribute__((visibility("default")))

struct rule {
	int fn;
	unsigned long nth;	/* 0: every */
	bool onward;
	int value;
};

struct handle {
	bool live;
	int fd;			/* the caller's */
	int own_fd;		/* the same file without O_DIRECT */
};

struct buffer {
	uintptr_t at;
	size_t size;
	bool live;
};

struct stream {
	CUstream handle;
	bool live;
	unsigned long queued;
};

/* A stream call that has not been executed; the pointers are the caller's. */
struct late {
	struct late *next;
	bool write;
	void *fh, *base, *context;
	CUstream stream;
	const size_t *size;
	const off_t *offset, *base_offset;
	ssize_t *moved;
};

/* Bytes of a stream read that have been told of and are not in device memory yet. */
struct loose {
	struct loose *next;
	void *context;
	uintptr_t at;
	size_t size;
	unsigned char bytes[];
};

struct batch {
	bool live, fresh;
	unsigned int room, count, left;
	CUfileIOParams_t entries[BATCH_LIMIT];
	bool told[BATCH_LIMIT];
	bool cancelled;
};

static struct {
	struct rule fail[RULES_MAX];
	int fail_count;
	struct rule cut[RULES_MAX];
	int cut_count;
	int register_error, driver_error;
	bool compat, shuffle;
	const char *report;
} cfg;

static struct {
	int (*cuCtxGetCurrent)(void **);
	int (*cuMemcpyHtoD_v2)(unsigned long long, const void *, size_t);
	int (*cuMemcpyDtoH_v2)(void *, unsigned long long, size_t);
	int (*cuStreamSynchronize)(CUstream);
	int (*cuLaunchHostFunc)(CUstream, void (*)(void *), void *);
	void *(*fake_cuda_reach)(unsigned long long, size_t);
	void (*fake_cuda_on_settle)(void (*)(void *));
} cuda;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t owner;
static bool driver_open;
static struct handle *handles;
static size_t handle_count, handle_room;
static struct buffer *buffers;
static size_t buffer_count, buffer_room;
static struct stream *streams;
static size_t stream_count, stream_room;
static struct batch **batches;
static size_t batch_count, batch_room;
static struct late *late_calls;
static struct loose *loose_reads, **loose_end = &loose_reads;	/* first told, first in place */
static unsigned long calls[FN_COUNT], transfers, shortened, injected, driver_opens, driver_closes;
static unsigned long long bytes_read, bytes_written;
static unsigned long violations;
static char *texts[TEXTS_MAX];

/* ------------------------------------------------------------------------- configuration -- */

static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fputs("fake_cufile: ", stderr);
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
	fflush(NULL);
	_exit(98);
}

static void __attribute__((format(printf, 1, 2))) violate_locked(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	if (violations < TEXTS_MAX && vasprintf(&texts[violations], format, args) < 0)
		texts[violations] = NULL;
	violations++;
	va_end(args);
}

static int env_number(const char *name, int fallback)
{
	const char *text = getenv(name);
	char *end;
	long value;

	if (!text || !*text)
		return fallback;
	value = strtol(text, &end, 10);
	if (*end || value < 0 || value > INT_MAX)
		die("%s: bad number '%s'", name, text);
	return (int)value;
}

static const char *parse_count(const char *name, const char *at, struct rule *rule)
{
	char *end;

	if (*at == '*')
		return at + 1;
	if (!isdigit((unsigned char)*at))
		die("%s: bad count at '%s'", name, at);
	rule->nth = strtoul(at, &end, 10);
	if (!rule->nth)
		die("%s: counts start at 1", name);
	rule->onward = *end == '+';
	return end + rule->onward;
}

static const char *parse_function(const char *name, const char *at, struct rule *rule)
{
	const char *colon = strchr(at, ':');

	for (int i = 0; colon && i < FN_COUNT; i++)
		if (strlen(fn_names[i]) == (size_t)(colon - at) &&
		    !memcmp(fn_names[i], at, (size_t)(colon - at))) {
			rule->fn = i;
			return colon + 1;
		}
	die("%s: no function at '%s'", name, at);
}

/* "[function:]count[=value]", comma separated. */
static int parse_rules(const char *name, struct rule *rules, bool full)
{
	const char *at = getenv(name);
	int count = 0;

	while (at && *at) {
		struct rule rule = { 0 };
		char *end;

		if (full)
			at = parse_function(name, at, &rule);
		at = parse_count(name, at, &rule);
		if (full) {
			if (*at != '=' || !isdigit((unsigned char)at[1]))
				die("%s: no '=number' at '%s'", name, at);
			rule.value = (int)strtol(at + 1, &end, 10);
			at = end;
		}
		if (*at && *at != ',')
			die("%s: unexpected text at '%s'", name, at);
		if (count == RULES_MAX)
			die("%s: more than %d rules", name, RULES_MAX);
		rules[count++] = rule;
		at += *at == ',';
	}
	return count;
}

static void *need(void *library, const char *name)
{
	void *symbol = dlsym(library, name);

	if (!symbol)
		die("libcuda.so.1 has no %s: this fake goes with the fake libcuda", name);
	return symbol;
}

static void land_loose(void *context);

static void configure(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

	if (!library)
		die("libcuda.so.1: %s", dlerror());
	*(void **)&cuda.cuCtxGetCurrent = need(library, "cuCtxGetCurrent");
	*(void **)&cuda.cuMemcpyHtoD_v2 = need(library, "cuMemcpyHtoD_v2");
	*(void **)&cuda.cuMemcpyDtoH_v2 = need(library, "cuMemcpyDtoH_v2");
	*(void **)&cuda.cuStreamSynchronize = need(library, "cuStreamSynchronize");
	*(void **)&cuda.cuLaunchHostFunc = need(library, "cuLaunchHostFunc");
	*(void **)&cuda.fake_cuda_reach = need(library, "fake_cuda_reach");
	*(void **)&cuda.fake_cuda_on_settle = need(library, "fake_cuda_on_settle");
	cuda.fake_cuda_on_settle(land_loose);
	cfg.fail_count = parse_rules("FAKE_CUFILE_FAIL", cfg.fail, true);
	cfg.cut_count = parse_rules("FAKE_CUFILE_SHORT", cfg.cut, false);
	cfg.register_error = env_number("FAKE_CUFILE_REGISTER_ERROR", 0);
	cfg.driver_error = env_number("FAKE_CUFILE_DRIVER_ERROR", 0);
	cfg.compat = env_number("FAKE_CUFILE_COMPAT", 1);
	cfg.shuffle = env_number("FAKE_CUFILE_BATCH_SHUFFLE", 0);
}

static const struct rule *match(const struct rule *rules, int count, int fn, unsigned long nth)
{
	for (int i = 0; i < count; i++)
		if (rules[i].fn == fn && (!rules[i].nth || rules[i].nth == nth ||
					  (rules[i].onward && nth > rules[i].nth)))
			return &rules[i];
	return NULL;
}

/* Count a call; the error with which it shall fail, or 0. */
static int count_locked(int fn)
{
	const struct rule *rule = match(cfg.fail, cfg.fail_count, fn, ++calls[fn]);

	injected += rule != NULL;
	return rule ? rule->value : 0;
}

/* Every entry point starts here, and leaves with the mutex held. */
static int enter(int fn)
{
	pthread_once(&once, configure);
	pthread_mutex_lock(&lock);
	return count_locked(fn);
}

static CUfileError_t leave(int code)
{
	pthread_mutex_unlock(&lock);
	return (CUfileError_t){ .err = code };
}

static void *grow(void *items, size_t count, size_t *room, size_t size)
{
	if (count < *room)
		return items;
	*room = *room ? *room * 2 : 32;
	items = realloc(items, *room * size);
	if (!items)
		die("out of memory");
	return items;
}

static void *make_handle(unsigned int tag, size_t index)
{
	return (void *)(uintptr_t)(tag + (index << 4));
}

/* ------------------------------------------------------------------------------- driver -- */

EXPORT CUfileError_t cuFileDriverOpen(void)
{
	int code = enter(FN_cuFileDriverOpen);

	driver_opens++;
	if (!code)
		code = cfg.driver_error;
	if (!code && driver_open) {
		violate_locked("cuFileDriverOpen while it is open");
		code = ERR_OPEN_TWICE;
	}
	driver_open |= !code;
	return leave(code);
}

EXPORT CUfileError_t cuFileDriverClose_v2(void)
{
	int code = enter(FN_cuFileDriverClose_v2);

	if (!code && !driver_open) {
		violate_locked("cuFileDriverClose while it is not open");
		code = ERR_DRIVER;
	}
	if (!code) {
		driver_open = false;
		driver_closes++;
	}
	return leave(code);
}

EXPORT CUfileError_t cuFileDriverClose(void)
{
	pthread_mutex_lock(&lock);
	violate_locked("cuFileDriverClose by its old name");
	return leave(ERR_VALUE);
}

EXPORT CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *props)
{
	int code = enter(FN_cuFileDriverGetProperties);

	if (code)
		return leave(code);
	memset(props, 0, sizeof(*props));
	props->max_direct_io_size = 16384;
	props->dcontrolflags = 1u << 1;
	props->max_batch_io_size = BATCH_LIMIT;
	if (!cfg.compat) {
		props->nvfs_major = 2;
		props->nvfs_minor = 25;
		props->dstatusflags = 1u << 4;
	}
	return leave(0);
}

EXPORT CUfileError_t cuFileGetVersion(int *version)
{
	int code = enter(FN_cuFileGetVersion);

	*version = 1150;
	return leave(code);
}

/* -------------------------------------------------------------------- files and buffers -- */

static struct handle *handle_locked(void *fh)
{
	uintptr_t number = (uintptr_t)fh - HANDLE_TAG;

	if (number >> 4 < handle_count && !(number & 15) && handles[number >> 4].live)
		return &handles[number >> 4];
	violate_locked("use of a file handle that is not registered");
	return NULL;
}

EXPORT CUfileError_t cuFileHandleRegister(void **fh, CUfileDescr_t *descr)
{
	char path[64], name[PATH_MAX];
	ssize_t length;
	int flags, own, code = enter(FN_cuFileHandleRegister);

	if (!code)
		code = cfg.register_error;
	if (!code && !driver_open) {
		violate_locked("cuFileHandleRegister before cuFileDriverOpen");
		code = ERR_DRIVER;
	}
	if (!code && (!fh || !descr || descr->type != 1 || descr->fs_ops))
		code = ERR_VALUE;
	if (code)
		return leave(code);
	for (size_t i = 0; i < handle_count; i++)
		if (handles[i].live && handles[i].fd == descr->handle.fd)
			return leave(ERR_FILE_TWICE);
	flags = fcntl(descr->handle.fd, F_GETFL);
	if (flags < 0)
		return leave(ERR_FILE_TYPE);
	/* The real library opens the file again by its name, so one without a name fails. */
	snprintf(path, sizeof(path), "/proc/self/fd/%d", descr->handle.fd);
	length = readlink(path, name, sizeof(name) - 1);
	if (length < 0)
		return leave(ERR_NEWFD);
	name[length] = 0;
	own = open(name, (flags & O_ACCMODE) | O_CLOEXEC);
	if (own < 0)
		return leave(ERR_NEWFD);
	handles = grow(handles, handle_count, &handle_room, sizeof(*handles));
	handles[handle_count] =
		(struct handle){ .live = true, .fd = descr->handle.fd, .own_fd = own };
	*fh = make_handle(HANDLE_TAG, handle_count++);
	return leave(0);
}

EXPORT void cuFileHandleDeregister(void *fh)
{
	struct handle *handle;

	enter(FN_cuFileHandleDeregister);
	handle = handle_locked(fh);
	if (handle) {
		for (struct late *late = late_calls; late; late = late->next)
			if (late->fh == fh)
				violate_locked("file deregistered with stream calls under way");
		close(handle->own_fd);
		handle->live = false;
	}
	leave(0);
}

static struct buffer *buffer_locked(const void *base)
{
	for (size_t i = 0; i < buffer_count; i++)
		if (buffers[i].live && buffers[i].at == (uintptr_t)base)
			return &buffers[i];
	return NULL;
}

EXPORT CUfileError_t cuFileBufRegister(const void *base, size_t size, int flags)
{
	int code = enter(FN_cuFileBufRegister);

	if (!code && (!base || !size || flags))
		code = ERR_VALUE;
	if (!code && buffer_locked(base))
		code = ERR_BUF_TWICE;
	if (code)
		return leave(code);
	buffers = grow(buffers, buffer_count, &buffer_room, sizeof(*buffers));
	buffers[buffer_count++] =
		(struct buffer){ .at = (uintptr_t)base, .size = size, .live = true };
	return leave(0);
}

EXPORT CUfileError_t cuFileBufDeregister(const void *base)
{
	int code = enter(FN_cuFileBufDeregister);
	struct buffer *buffer = buffer_locked(base);

	if (!buffer) {
		violate_locked("cuFileBufDeregister of memory that is not registered");
		return leave(ERR_BUF_UNKNOWN);
	}
	buffer->live = false;
	return leave(code);
}

/* ------------------------------------------------------------------------- moving bytes -- */

/*
 * What a transfer needs, looked up and counted in one go; a negative error, or 0. Half of the
 * size is left where the transfer shall be short.
 */
static int prepare(void *fh, const void *base, off_t base_offset, size_t *size, int *fd)
{
	struct handle *handle;
	struct buffer *buffer;
	int rc = 0;

	pthread_mutex_lock(&lock);
	handle = handle_locked(fh);
	buffer = buffer_locked(base);
	transfers++;
	if (!handle)
		rc = -ERR_UNREGISTERED;
	else if (base_offset < 0 ||
		 (buffer && (size_t)base_offset + *size > buffer->size))
		rc = -ERR_RANGE;
	else
		*fd = handle->own_fd;
	if (match(cfg.cut, cfg.cut_count, 0, transfers)) {
		shortened++;
		*size /= 2;
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

static void account(bool write, size_t n)
{
	pthread_mutex_lock(&lock);
	if (write)
		bytes_written += n;
	else
		bytes_read += n;
	pthread_mutex_unlock(&lock);
}

/* One piece through the bounce buffer. Bytes, or -1 with errno, or a negative cuFile error. */
static ssize_t move_piece(bool write, int fd, uintptr_t at, off_t offset, void *bounce, size_t n)
{
	ssize_t got;
	int rc = 0;

	if (write) {
		rc = cuda.cuMemcpyDtoH_v2(bounce, at, n);
		return rc ? -ERR_POINTER : pwrite(fd, bounce, n, offset);
	}
	got = pread(fd, bounce, n, offset);
	if (got > 0)
		rc = cuda.cuMemcpyHtoD_v2(at, bounce, (size_t)got);
	/* The copy has only read its source; a read that is over has the bytes in their place. */
	if (got > 0 && !rc)
		rc = cuda.cuStreamSynchronize(NULL);
	return rc ? -ERR_POINTER : got;
}

/* On the caller's thread: bytes, -1 with errno, or a negative cuFile error. */
static ssize_t move_now(bool write, void *fh, const void *base, size_t size, off_t offset,
			off_t base_offset)
{
	void *context = NULL, *bounce;
	size_t done = 0;
	ssize_t n = 0;
	int fd = -1, rc;

	if (cuda.cuCtxGetCurrent(&context) || !context)
		return -ERR_CONTEXT;
	rc = prepare(fh, base, base_offset, &size, &fd);
	if (rc)
		return rc;
	bounce = malloc(BOUNCE);
	if (!bounce)
		die("out of memory");
	while (done < size) {
		size_t piece = size - done < BOUNCE ? size - done : BOUNCE;

		n = move_piece(write, fd, (uintptr_t)base + (size_t)base_offset + done,
			       offset + (off_t)done, bounce, piece);
		if (n <= 0)
			break;
		done += (size_t)n;
	}
	free(bounce);
	account(write, done);
	return n < 0 && !done ? n : (ssize_t)done;
}

static ssize_t sync_call(int fn, bool write, void *fh, const void *base, size_t size,
			 off_t offset, off_t base_offset)
{
	int code = enter(fn);

	leave(0);
	if (code >= 5000)
		return -code;
	if (code) {
		errno = code;
		return -1;
	}
	return move_now(write, fh, base, size, offset, base_offset);
}

EXPORT ssize_t cuFileRead(void *fh, void *base, size_t size, off_t offset, off_t base_offset)
{
	return sync_call(FN_cuFileRead, false, fh, base, size, offset, base_offset);
}

EXPORT ssize_t cuFileWrite(void *fh, const void *base, size_t size, off_t offset,
			   off_t base_offset)
{
	return sync_call(FN_cuFileWrite, true, fh, base, size, offset, base_offset);
}

/* ------------------------------------------------------------------------- stream calls -- */

static struct stream *stream_locked(CUstream handle)
{
	for (size_t i = 0; i < stream_count; i++)
		if (streams[i].live && streams[i].handle == handle)
			return &streams[i];
	return NULL;
}

EXPORT CUfileError_t cuFileStreamRegister(CUstream handle, unsigned int flags)
{
	int code = enter(FN_cuFileStreamRegister);

	if (!code && (flags > 15 || stream_locked(handle)))
		code = ERR_VALUE;
	if (code)
		return leave(code);
	streams = grow(streams, stream_count, &stream_room, sizeof(*streams));
	streams[stream_count++] = (struct stream){ .handle = handle, .live = true };
	return leave(0);
}

EXPORT CUfileError_t cuFileStreamDeregister(CUstream handle)
{
	int code = enter(FN_cuFileStreamDeregister);
	struct stream *stream = stream_locked(handle);

	if (!stream) {
		violate_locked("cuFileStreamDeregister of a stream that is not registered");
		return leave(ERR_VALUE);
	}
	if (stream->queued)
		violate_locked("cuFileStreamDeregister with %lu calls under way", stream->queued);
	stream->live = false;
	return leave(code);
}

/* Run by the fake libcuda with its lock held, as what follows. */
static void land_loose(void *context)
{
	struct loose **link = &loose_reads, *loose;
	unsigned char *bytes;

	pthread_mutex_lock(&lock);
	while ((loose = *link)) {
		if (loose->context != context) {
			link = &loose->next;
			continue;
		}
		bytes = cuda.fake_cuda_reach(loose->at, loose->size);
		if (bytes)
			memcpy(bytes, loose->bytes, loose->size);
		else
			violate_locked("memory freed before the bytes of a stream read were there");
		*link = loose->next;
		free(loose);
	}
	loose_end = link;
	pthread_mutex_unlock(&lock);
}

static ssize_t read_loose(const struct late *late, int fd, uintptr_t at, size_t size)
{
	struct loose *loose = malloc(sizeof(*loose) + size);
	ssize_t n;

	if (!loose)
		die("out of memory");
	n = pread(fd, loose->bytes, size, *late->offset);
	if (n <= 0) {
		free(loose);
		return n;
	}
	loose->context = late->context;
	loose->at = at;
	loose->size = (size_t)n;
	loose->next = NULL;
	pthread_mutex_lock(&lock);
	*loose_end = loose;
	loose_end = &loose->next;
	pthread_mutex_unlock(&lock);
	return n;
}

/* The bytes are reached, not copied through libcuda. */
static ssize_t move_reached(const struct late *late)
{
	size_t size = *late->size;
	off_t base_offset = *late->base_offset;
	unsigned char *bytes;
	ssize_t n;
	int fd = -1, rc = prepare(late->fh, late->base, base_offset, &size, &fd);

	if (rc)
		return rc;
	bytes = cuda.fake_cuda_reach((uintptr_t)late->base + (size_t)base_offset, size);
	if (!bytes)
		return -ERR_POINTER;
	if (late->write)
		n = pwrite(fd, bytes, size, *late->offset);
	else if (cfg.compat)
		n = read_loose(late, fd, (uintptr_t)late->base + (size_t)base_offset, size);
	else
		n = pread(fd, bytes, size, *late->offset);
	if (n < 0)
		return -errno;
	account(late->write, (size_t)n);
	return n;
}

/* Takes the call off the books. */
static void unlink_late(struct late *late)
{
	struct late **link = &late_calls;
	struct stream *stream;

	pthread_mutex_lock(&lock);
	while (*link && *link != late)
		link = &(*link)->next;
	if (*link) {
		*link = late->next;
		stream = stream_locked(late->stream);
		if (stream)
			stream->queued--;
	}
	pthread_mutex_unlock(&lock);
}

static void run_late(void *argument)
{
	struct late *late = argument;
	int code;

	pthread_mutex_lock(&lock);
	code = count_locked(FN_STREAM_IO);
	pthread_mutex_unlock(&lock);
	*late->moved = code ? -code : move_reached(late);
	unlink_late(late);
	free(late);
}

static CUfileError_t stream_call(int fn, struct late wanted)
{
	int code = enter(fn), rc;
	struct stream *stream = stream_locked(wanted.stream);
	struct late *late;

	if (!code && (!wanted.size || !wanted.offset || !wanted.base_offset || !wanted.moved))
		code = ERR_VALUE;
	if (!code && !handle_locked(wanted.fh))
		code = ERR_UNREGISTERED;
	if (code)
		return leave(code);
	late = malloc(sizeof(*late));
	if (!late)
		die("out of memory");
	*late = wanted;
	late->next = late_calls;
	late_calls = late;
	if (stream)
		stream->queued++;
	pthread_mutex_unlock(&lock);
	rc = cuda.cuCtxGetCurrent(&late->context);
	if (!rc)
		rc = cuda.cuLaunchHostFunc(wanted.stream, run_late, late);
	if (rc) {
		unlink_late(late);
		free(late);
		return (CUfileError_t){ .err = ERR_CUDA, .cu_err = rc };
	}
	return (CUfileError_t){ 0 };
}

EXPORT CUfileError_t cuFileReadAsync(void *fh, void *base, size_t *size, off_t *offset,
				     off_t *base_offset, ssize_t *moved, CUstream stream)
{
	return stream_call(FN_cuFileReadAsync,
			   (struct late){ .fh = fh, .base = base, .size = size, .offset = offset,
					  .base_offset = base_offset, .moved = moved,
					  .stream = stream });
}

EXPORT CUfileError_t cuFileWriteAsync(void *fh, void *base, size_t *size, off_t *offset,
				      off_t *base_offset, ssize_t *moved, CUstream stream)
{
	return stream_call(FN_cuFileWriteAsync,
			   (struct late){ .fh = fh, .base = base, .size = size, .offset = offset,
					  .base_offset = base_offset, .moved = moved,
					  .stream = stream, .write = true });
}

/* ------------------------------------------------------------------------------ batches -- */

static struct batch *batch_locked(void *id)
{
	uintptr_t number = (uintptr_t)id - BATCH_TAG;

	if (number >> 4 < batch_count && !(number & 15) && batches[number >> 4]->live)
		return batches[number >> 4];
	violate_locked("use of a batch that does not exist");
	return NULL;
}

EXPORT CUfileError_t cuFileBatchIOSetUp(void **id, unsigned int room)
{
	int code = enter(FN_cuFileBatchIOSetUp);

	if (!code && (!id || !room || room > BATCH_LIMIT))
		code = ERR_VALUE;
	if (code)
		return leave(code);
	batches = grow(batches, batch_count, &batch_room, sizeof(struct batch *));
	batches[batch_count] = calloc(1, sizeof(struct batch));
	if (!batches[batch_count])
		die("out of memory");
	batches[batch_count]->live = true;
	batches[batch_count]->room = room;
	*id = make_handle(BATCH_TAG, batch_count++);
	return leave(0);
}

EXPORT CUfileError_t cuFileBatchIOSubmit(void *id, unsigned int count, CUfileIOParams_t *params,
					 unsigned int flags)
{
	int code = enter(FN_cuFileBatchIOSubmit);
	struct batch *batch = batch_locked(id);

	if (!code && (!batch || !count || !params || flags || count > batch->room))
		code = ERR_VALUE;
	if (!code && batch->left) {
		violate_locked("cuFileBatchIOSubmit with %u entries under way", batch->left);
		code = ERR_BATCH_FULL;
	}
	for (unsigned int i = 0; !code && i < count; i++)
		if (params[i].mode != 1 || params[i].opcode < 0 || params[i].opcode > 1 ||
		    !handle_locked(params[i].fh))
			code = ERR_VALUE;
	if (code)
		return leave(code);
	memcpy(batch->entries, params, count * sizeof(*params));
	memset(batch->told, 0, sizeof(batch->told));
	batch->count = batch->left = count;
	batch->fresh = true;
	batch->cancelled = false;
	return leave(0);
}

/* How many entries this poll tells of; it is late and, if shuffled, sparing. */
static unsigned int batch_share(struct batch *batch, unsigned int least, unsigned int room)
{
	unsigned int share = batch->left;

	if (cfg.shuffle && share > 1)
		share = (share + 2) / 3;
	if (batch->fresh && !least)
		share = 0;
	batch->fresh = false;
	if (share < least)
		share = least < batch->left ? least : batch->left;
	return share < room ? share : room;
}

static CUfileIOParams_t *batch_next(struct batch *batch)
{
	static unsigned int seed = 12345;
	unsigned int at = 0;

	if (cfg.shuffle) {
		seed = seed * 1103515245u + 12345u;
		at = (seed >> 16) % batch->count;
	}
	while (batch->told[at])
		at = (at + 1) % batch->count;
	batch->told[at] = true;
	batch->left--;
	return &batch->entries[at];
}

EXPORT CUfileError_t cuFileBatchIOGetStatus(void *id, unsigned int least, unsigned int *count,
					    CUfileIOEvents_t *events, struct timespec *timeout)
{
	int code = enter(FN_cuFileBatchIOGetStatus);
	struct batch *batch = batch_locked(id);
	unsigned int share;

	(void)timeout;		/* nothing here takes time */
	if (!code && (!batch || !count || !events || least > *count))
		code = ERR_VALUE;
	if (code)
		return leave(code);
	share = batch_share(batch, least, *count);
	for (unsigned int i = 0; i < share; i++) {
		CUfileIOParams_t *entry = batch_next(batch);
		int late = count_locked(FN_BATCH_ENTRY);
		ssize_t moved = 0;

		if (!batch->cancelled && !late) {
			pthread_mutex_unlock(&lock);
			moved = move_now(entry->opcode, entry->fh, entry->u.batch.base,
					 entry->u.batch.size, entry->u.batch.file_offset,
					 entry->u.batch.base_offset);
			if (moved == -1)
				moved = -errno;
			pthread_mutex_lock(&lock);
		}
		events[i] = (CUfileIOEvents_t){
			.cookie = entry->cookie,
			.status = batch->cancelled ? STATUS_CANCELED :
				  late == ETIMEDOUT ? STATUS_TIMEOUT :
				  late || moved < 0 ? STATUS_FAILED : STATUS_COMPLETE,
			.ret = (size_t)(late == ETIMEDOUT ? 0 : late ? -late : moved),
		};
	}
	*count = share;
	return leave(0);
}

EXPORT CUfileError_t cuFileBatchIOCancel(void *id)
{
	int code = enter(FN_cuFileBatchIOCancel);
	struct batch *batch = batch_locked(id);

	if (batch)
		batch->cancelled = true;
	return leave(code);
}

EXPORT void cuFileBatchIODestroy(void *id)
{
	struct batch *batch;

	enter(FN_cuFileBatchIODestroy);
	batch = batch_locked(id);
	if (batch) {
		if (batch->left && !batch->cancelled)
			violate_locked("batch destroyed with %u entries under way", batch->left);
		batch->live = false;
	}
	leave(0);
}

/* --------------------------------------------------------------------------- accounting -- */

struct tally {
	unsigned long handles, buffers, streams, batches, queued, total;
};

static struct tally take_stock_locked(void)
{
	struct tally tally = { 0 };

	for (size_t i = 0; i < handle_count; i++)
		tally.handles += handles[i].live;
	for (size_t i = 0; i < buffer_count; i++)
		tally.buffers += buffers[i].live;
	for (size_t i = 0; i < stream_count; i++)
		tally.streams += streams[i].live;
	for (size_t i = 0; i < batch_count; i++)
		tally.batches += batches[i]->live;
	for (struct late *late = late_calls; late; late = late->next)
		tally.queued++;
	tally.total = tally.handles + tally.buffers + tally.streams + tally.batches +
		      tally.queued + violations;
	return tally;
}

/* The number of things leaked, left queued or done wrong; an open driver is not one of them. */
EXPORT int fake_cufile_leaks(char *text, size_t size)
{
	struct tally tally;
	int used;

	pthread_mutex_lock(&lock);
	tally = take_stock_locked();
	if (text && size) {
		used = snprintf(text, size, "handles %lu, buffers %lu, streams %lu, batches %lu, "
				"queued calls %lu, violations %lu", tally.handles, tally.buffers,
				tally.streams, tally.batches, tally.queued, violations);
		for (unsigned long i = 0; i < violations && i < TEXTS_MAX; i++)
			if (used >= 0 && (size_t)used < size)
				used += snprintf(text + used, size - (size_t)used, "; %s",
						 texts[i] ? texts[i] : "?");
	}
	pthread_mutex_unlock(&lock);
	return tally.total > INT_MAX ? INT_MAX : (int)tally.total;
}

static FILE *open_report(void)
{
	const char *mark = strstr(cfg.report, "%p");
	char path[4096];
	FILE *file;

	if (mark)
		snprintf(path, sizeof(path), "%.*s%d%s", (int)(mark - cfg.report), cfg.report,
			 (int)getpid(), mark + 2);
	else
		snprintf(path, sizeof(path), "%s", cfg.report);
	file = fopen(path, "we");
	if (!file)
		fprintf(stderr, "fake_cufile: %s: %s\n", path, strerror(errno));
	return file;
}

static void write_report_locked(void)
{
	struct tally tally = take_stock_locked();
	FILE *file = open_report();
	bool first = true;

	if (!file)
		return;
	fprintf(file, "{\n\t\"leaks\": %lu,\n", tally.total);
	fprintf(file, "\t\"open_handles\": %lu,\n", tally.handles);
	fprintf(file, "\t\"registered_buffers\": %lu,\n", tally.buffers);
	fprintf(file, "\t\"registered_streams\": %lu,\n", tally.streams);
	fprintf(file, "\t\"batches\": %lu,\n", tally.batches);
	fprintf(file, "\t\"queued_stream_calls\": %lu,\n", tally.queued);
	fprintf(file, "\t\"driver_opens\": %lu,\n", driver_opens);
	fprintf(file, "\t\"driver_closes\": %lu,\n", driver_closes);
	fprintf(file, "\t\"transfers\": %lu,\n", transfers);
	fprintf(file, "\t\"shortened\": %lu,\n", shortened);
	fprintf(file, "\t\"injected\": %lu,\n", injected);
	fprintf(file, "\t\"bytes_read\": %llu,\n", bytes_read);
	fprintf(file, "\t\"bytes_written\": %llu,\n", bytes_written);
	fprintf(file, "\t\"violations\": %lu,\n\t\"violation_texts\": [", violations);
	for (unsigned long i = 0; i < violations && i < TEXTS_MAX; i++)
		fprintf(file, "%s\n\t\t\"%s\"", i ? "," : "", texts[i] ? texts[i] : "?");
	fprintf(file, "%s],\n\t\"calls\": {", violations ? "\n\t" : "");
	for (int i = 0; i < FN_COUNT; i++)
		if (calls[i]) {
			fprintf(file, "%s\n\t\t\"%s\": %lu", first ? "" : ",", fn_names[i],
				calls[i]);
			first = false;
		}
	fprintf(file, "%s}\n}\n", first ? "" : "\n\t");
	fclose(file);
}

static void __attribute__((constructor)) fake_load(void)
{
	owner = getpid();
	cfg.report = getenv("FAKE_CUFILE_REPORT");
}

/* A child of fork() inherits the books but owns nothing in them. */
static void __attribute__((destructor)) fake_unload(void)
{
	if (owner != getpid())
		return;
	if (cuda.fake_cuda_on_settle)
		cuda.fake_cuda_on_settle(NULL);
	pthread_mutex_lock(&lock);
	if (cfg.report && *cfg.report)
		write_report_locked();
	/* Only for leak checkers. Late calls stay: a stream of libcuda may still point at them. */
	while (loose_reads) {
		struct loose *loose = loose_reads;

		loose_reads = loose->next;
		free(loose);
	}
	loose_end = &loose_reads;
	for (size_t i = 0; i < batch_count; i++)
		free(batches[i]);
	for (int i = 0; i < TEXTS_MAX; i++)
		free(texts[i]);
	free(handles);
	free(buffers);
	free(streams);
	free(batches);
	handle_count = buffer_count = stream_count = batch_count = 0;
	pthread_mutex_unlock(&lock);
}
