/* SPDX-License-Identifier: MIT */
/*
 * cuFile behind one table: loading it, its driver, its errors in words, and the registrations
 * that it allows only once per process. See cufile.h.
 *
 * Invariants
 *   1. cuFileDriverOpen is called only from cufile_open(), and not again while it is open. A
 *      refusal by the library is remembered, since asking costs as much as succeeding.
 *   2. A descriptor is registered while, and only while, its `users` is not 0.
 *   3. `lock` guards everything static here except `api`, `facts` and `library`, which do not
 *      change while anybody is between cufile_open() and cufile_close().
 *   4. The library is never unloaded: it has threads and exit handlers of its own.
 *   5. A forked child inherits nothing of all that, and never calls a library that its parent used.
 */
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "base/error.h"
#include "base/text.h"
#include "sys/cufile.h"
#include "sys/fault.h"
#include "sys/os.h"

/* CUfileError_t, returned by value. */
struct status {
	int code;	/* 0, or 5000 + n */
	int cuda;	/* CUresult, where code is 5011 */
};

/* CUfileDescr_t */
struct descriptor {
	int type;
	union {
		int fd;
		void *handle;
	} file;
	const void *operations;
};

/* CUfileDrvProps_t */
struct properties {
	unsigned int nvfs_major, nvfs_minor;
	size_t poll_threshold_kb, direct_max_kb;
	unsigned int stores, control;
	unsigned int features;
	unsigned int cache_max_kb, cache_buffer_kb, pinned_max_kb;
	unsigned int batch_max, batch_timeout_ms;
};

_Static_assert(sizeof(struct status) == 8, "CUfileError_t");
_Static_assert(sizeof(struct descriptor) == 24, "CUfileDescr_t");
_Static_assert(sizeof(struct properties) == 56, "CUfileDrvProps_t");
_Static_assert(sizeof(struct cufile_batch_entry) == 64, "CUfileIOParams_t");
_Static_assert(sizeof(struct cufile_batch_event) == 24, "CUfileIOEvents_t");
_Static_assert(sizeof(off_t) == 8, "the library's off_t");

enum {
	TYPE_FD = 1,			/* CU_FILE_HANDLE_TYPE_OPAQUE_FD */
	STORE_NVME_P2P = 11,		/* up to 1.14; later FEATURE_P2P says it */
	FEATURE_P2P = 4,
	/* Every offset and size is known when the call is queued: the library may look then. */
	STREAM_FIXED = 1 | 2 | 4,

	FILES_MAX = 1024,
};

struct api {
	struct status (*cuFileDriverOpen)(void);
	struct status (*cuFileDriverClose_v2)(void);
	struct status (*cuFileDriverGetProperties)(struct properties *);
	struct status (*cuFileHandleRegister)(void **, struct descriptor *);
	void (*cuFileHandleDeregister)(void *);
	ssize_t (*cuFileRead)(void *, void *, size_t, off_t, off_t);
	ssize_t (*cuFileWrite)(void *, const void *, size_t, off_t, off_t);
	/* From here on NULL where the library is too old. */
	struct status (*cuFileGetVersion)(int *);
	struct status (*cuFileStreamRegister)(void *, unsigned int);
	struct status (*cuFileStreamDeregister)(void *);
	struct status (*cuFileReadAsync)(void *, void *, size_t *, off_t *, off_t *, ssize_t *,
					 void *);
	struct status (*cuFileWriteAsync)(void *, void *, size_t *, off_t *, off_t *, ssize_t *,
					  void *);
	struct status (*cuFileBatchIOSetUp)(void **, unsigned int);
	struct status (*cuFileBatchIOSubmit)(void *, unsigned int, struct cufile_batch_entry *,
					     unsigned int);
	struct status (*cuFileBatchIOGetStatus)(void *, unsigned int, unsigned int *,
						struct cufile_batch_event *, struct timespec *);
	struct status (*cuFileBatchIOCancel)(void *);
	void (*cuFileBatchIODestroy)(void *);
};

#define ENTRY(name, needed) { #name, offsetof(struct api, name), needed }

static const struct {
	const char *symbol;
	size_t field;
	bool needed;
} entries[] = {
	ENTRY(cuFileDriverOpen, true),
	ENTRY(cuFileDriverClose_v2, true),
	ENTRY(cuFileDriverGetProperties, true),
	ENTRY(cuFileHandleRegister, true),
	ENTRY(cuFileHandleDeregister, true),
	ENTRY(cuFileRead, true),
	ENTRY(cuFileWrite, true),
	ENTRY(cuFileGetVersion, false),
	ENTRY(cuFileStreamRegister, false),
	ENTRY(cuFileStreamDeregister, false),
	ENTRY(cuFileReadAsync, false),
	ENTRY(cuFileWriteAsync, false),
	ENTRY(cuFileBatchIOSetUp, false),
	ENTRY(cuFileBatchIOSubmit, false),
	ENTRY(cuFileBatchIOGetStatus, false),
	ENTRY(cuFileBatchIOCancel, false),
	ENTRY(cuFileBatchIODestroy, false),
};

/* A descriptor, which the library lets us register once. */
struct registration {
	uintptr_t key;
	void *handle;
	unsigned int users;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct api api;
static struct cufile_facts facts;
static void *library;
static bool driver_open;
static unsigned int users;
static struct pen_error refusal;	/* code 0: the driver has not refused to open */
static struct registration files[FILES_MAX];

/* The lock is not taken before a fork: the library may well fork while it opens its driver. */
static void forget_parent(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	driver_open = false;
	users = 0;
	memset(files, 0, sizeof(files));
	/* Whoever loads it opens its driver next. */
	if (!library)
		return;
	error_set(&refusal, -ENODEV, "open", "the cuFile driver", -1,
		  "cuFile was started before this process was forked");
	error_hint(&refusal, "Start workers with the spawn method, or fork before the first use of "
			     "the GPU");
}

__attribute__((constructor)) static void mind_forks(void)
{
	os_at_fork(OS_FORK_CUFILE, NULL, forget_parent);
}

/* ----------------------------------------------------------------------------- its errors -- */

static const struct {
	int raw, code;
	const char *words, *hint;
} errors[] = {
	{ 5001, -ENODEV, "the cuFile driver is not running",
	  "Load the nvidia-fs module, or set \"allow_compat_mode\": true in /etc/cufile.json" },
	{ 5002, -EINVAL, "a cuFile property is not valid", NULL },
	{ 5003, -EINVAL, "a cuFile property is out of range", NULL },
	{ 5004, -ENODEV, "nvidia-fs and libcufile are of different versions",
	  "Install the nvidia-fs that belongs to this CUDA release" },
	{ 5005, -ENODEV, "the version of nvidia-fs cannot be read", "Reload the nvidia-fs module" },
	{ 5006, -ESHUTDOWN, "the cuFile driver is shutting down", NULL },
	{ 5007, -ENOTSUP, "cuFile does not support this platform", NULL },
	{ 5008, -ENOTSUP, "cuFile does not support this file or its file system",
	  "Use ext4 or XFS on NVMe, or a parallel file system with GPUDirect Storage" },
	{ 5009, -ENOTSUP, "cuFile does not support this GPU", NULL },
	{ 5010, -EIO, "nvidia-fs refused a request", "See dmesg and cufile.log" },
	{ 5011, -EIO, "CUDA failed inside cuFile", NULL },
	{ 5012, -EFAULT, "the address is not device memory", NULL },
	{ 5013, -EFAULT, "cuFile cannot use this kind of memory",
	  "Use memory of cudaMalloc or pen_device_alloc" },
	{ 5014, -EFAULT, "the range runs past the end of its allocation", NULL },
	{ 5015, -EINVAL, "the memory belongs to another CUDA context", NULL },
	{ 5016, -ENOMEM, "more GPU memory than cuFile may pin",
	  "Raise \"max_device_pinned_mem_size_kb\" in /etc/cufile.json" },
	{ 5017, -EFAULT, "the range runs past the registered memory", NULL },
	{ 5018, -ENOTSUP, "cuFile takes regular files only", NULL },
	{ 5019, -EINVAL, "the file is open in a way that cuFile does not take",
	  "cuFile wants O_DIRECT" },
	{ 5020, -EINVAL, "the file is not open with O_DIRECT", NULL },
	{ 5022, -EINVAL, "cuFile was given an invalid argument", NULL },
	{ 5023, -EEXIST, "the memory is registered with cuFile already", NULL },
	{ 5024, -ENOENT, "the memory is not registered with cuFile", NULL },
	{ 5025, -EACCES, "cuFile may not open its driver or the file",
	  "Check the rights on /dev/nvidia-fs* and on the file" },
	{ 5026, -EALREADY, "the cuFile driver is open already", NULL },
	{ 5027, -ENOTSUP, "cuFile cannot register the file",
	  "cuFile needs udev's ID_FS_USAGE for this device; in a container mount /run/udev" },
	{ 5028, -EEXIST, "the file is registered with cuFile already", NULL },
	{ 5029, -ENODEV, "cuFile does not find the GPU", NULL },
	{ 5030, -EIO, "cuFile failed inside", "See cufile.log" },
	{ 5031, -EMFILE, "cuFile could not get a file descriptor",
	  "It opens the file again by its name: is it still there, and ulimit -n high enough?" },
	{ 5033, -ENODEV, "nvidia-fs cannot be set up", "See dmesg" },
	{ 5034, -ENOTSUP, "GPUDirect Storage is switched off for this file",
	  "Look at the deny list in /etc/cufile.json" },
	{ 5035, -EIO, "cuFile could not submit a batch", "See cufile.log" },
	{ 5036, -ENOMEM, "cuFile could not pin GPU memory",
	  "BAR1 may be full (nvidia-smi -q -d MEMORY)" },
	{ 5037, -EBUSY, "the cuFile batch is full", NULL },
	{ 5038, -ENOTSUP, "cuFile has no stream calls here",
	  "Use transfer type 0 (GPU_DIRECT) or 6 (GPU_BATCH)" },
	{ 5039, -EIO, "cuFile could not set up a batch", "See cufile.log" },
	{ 5040, -EIO, "cuFile could not submit a batch", "See cufile.log" },
	{ 5041, -EIO, "cuFile could not tell the state of a batch", "See cufile.log" },
	{ 5042, -EIO, "cuFile could not cancel a batch", "See cufile.log" },
	{ 5043, -ENOMEM, "cuFile has no memory", NULL },
	{ 5044, -EIO, "cuFile met an I/O error", "See dmesg and cufile.log" },
	{ 5045, -EIO, "cuFile could not register memory", "See cufile.log" },
	{ 5047, -EINVAL, "the CUDA context is not valid for cuFile", NULL },
	{ 5048, -EIO, "nvidia-fs failed inside", "See dmesg" },
	{ 5049, -ENOTSUP, "batches need cuFile's compatibility mode here",
	  "Set \"allow_compat_mode\": true in /etc/cufile.json" },
};

static int fail(struct pen_error *err, int raw, int cuda, const char *operation,
		const char *object, int64_t offset)
{
	const char *words = "cuFile failed", *hint = NULL;
	int code = -EIO;

	raw = abs(raw);
	for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
		if (errors[i].raw == raw) {
			code = errors[i].code;
			words = errors[i].words;
			hint = errors[i].hint;
		}
	if (raw == 5011)
		error_vendor(err, code, PEN_DOMAIN_CUFILE, raw, operation, object,
			     "%s (CUDA error %d, cuFile error %d)", words, cuda, raw);
	else
		error_vendor(err, code, PEN_DOMAIN_CUFILE, raw, operation, object,
			     "%s (cuFile error %d)", words, raw);
	if (err)
		err->offset = offset;
	if (hint)
		error_hint(err, "%s", hint);
	return code;
}

/* Ask the hook, then call; 0 or a negative errno with words. */
#define CALL(function, arguments, operation, object, err)                                       \
	({                                                                                      \
		int call_rc = sys_fault(#function);                                             \
		if (call_rc) {                                                                  \
			call_rc = error_sys(err, -call_rc, operation, object, -1);              \
		} else {                                                                        \
			struct status call_status = api.function arguments;                     \
			if (call_status.code)                                                   \
				call_rc = fail(err, call_status.code, call_status.cuda,         \
					       operation, object, -1);                          \
		}                                                                               \
		call_rc;                                                                        \
	})

static int too_old(const char *what, struct pen_error *err)
{
	error_set(err, -ENOTSUP, "use", what, -1, "libcufile %d.%d does not have them",
		  facts.version / 1000, facts.version % 1000 / 10);
	error_hint(err, "Install CUDA 12.2 or later, or use transfer type 0 (GPU_DIRECT)");
	return -ENOTSUP;
}

/* ----------------------------------------------------------------------- opening, closing -- */

static int load_locked(struct pen_error *err)
{
	static const char *const names[] = {
		"libcufile.so.0",
		"/usr/local/cuda/lib64/libcufile.so.0",
	};
	void *found = NULL;
	int rc;

	if (library)
		return 0;
	rc = sys_fault("dlopen libcufile");
	if (rc)
		return error_sys(err, -rc, "open", "libcufile.so.0", -1);
	for (size_t i = 0; !found && i < sizeof(names) / sizeof(names[0]); i++)
		found = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
	if (!found) {
		error_set(err, -ENOTSUP, "open", "libcufile.so.0", -1,
			  "the cuFile library is not installed");
		error_hint(err, "Install the CUDA toolkit's libcufile, or add its folder to "
				"LD_LIBRARY_PATH");
		return -ENOTSUP;
	}
	for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
		void *symbol = dlsym(found, entries[i].symbol);

		if (!symbol && entries[i].needed) {
			error_set(err, -ENOTSUP, "open", "libcufile.so.0", -1,
				  "the cuFile library has no %s", entries[i].symbol);
			error_hint(err, "Install CUDA 12.2 or later");
			dlclose(found);
			return -ENOTSUP;
		}
		memcpy((char *)&api + entries[i].field, &symbol, sizeof(symbol));
	}
	library = found;
	return 0;
}

/* What the machine can do does not change while the driver is open. */
static int learn(struct pen_error *err)
{
	struct properties props;
	int rc;

	memset(&props, 0, sizeof(props));
	rc = CALL(cuFileDriverGetProperties, (&props), "ask the properties of", "cuFile", err);
	if (rc)
		return rc;
	memset(&facts, 0, sizeof(facts));
	if (api.cuFileGetVersion)
		CALL(cuFileGetVersion, (&facts.version), "ask the version of", "cuFile", NULL);
	/* Without nvidia-fs its version is 0, whatever the other fields say. */
	if (props.nvfs_major || props.nvfs_minor)
		facts.stores = props.stores & ~(1u << STORE_NVME_P2P);
	facts.p2pdma = (props.stores >> STORE_NVME_P2P & 1) || (props.features >> FEATURE_P2P & 1);
	facts.batch_max = props.batch_max && props.batch_max < CUFILE_BATCH_MAX ?
		props.batch_max : CUFILE_BATCH_MAX;
	return 0;
}

static int open_driver_locked(struct pen_error *err)
{
	struct status status;
	int rc = sys_fault("cuFileDriverOpen");

	if (rc)
		return error_sys(err, -rc, "open", "the cuFile driver", -1);
	if (refusal.code) {
		if (err)
			*err = refusal;
		return refusal.code;
	}
	status = api.cuFileDriverOpen();
	if (status.code) {
		rc = fail(&refusal, status.code, status.cuda, "open", "the cuFile driver", -1);
		if (err)
			*err = refusal;
		return rc;
	}
	rc = learn(err);
	if (rc)
		api.cuFileDriverClose_v2();
	else
		driver_open = true;
	return rc;
}

int cufile_open(struct pen_error *err)
{
	int rc;

	pthread_mutex_lock(&lock);
	rc = load_locked(err);
	if (!rc && !driver_open)
		rc = open_driver_locked(err);
	if (!rc)
		users++;
	pthread_mutex_unlock(&lock);
	return rc;
}

void cufile_close(void)
{
	pthread_mutex_lock(&lock);
	assert(users);
	users--;
	pthread_mutex_unlock(&lock);
}

void cufile_trim(void)
{
	pthread_mutex_lock(&lock);
	if (driver_open && !users)
		driver_open = api.cuFileDriverClose_v2().code != 0;
	pthread_mutex_unlock(&lock);
}

const struct cufile_facts *cufile_facts(void)
{
	return &facts;
}

/* -------------------------------------------------------------------------- registrations -- */

/* The registration of `key`, or a free place for one, or NULL. */
static struct registration *find_locked(struct registration *all, size_t count, uintptr_t key)
{
	struct registration *place = NULL;

	for (size_t i = 0; i < count; i++) {
		if (all[i].users && all[i].key == key)
			return &all[i];
		if (!all[i].users && !place)
			place = &all[i];
	}
	return place;
}

static int register_file(int fd, const char *name, void **handle, struct pen_error *err)
{
	struct descriptor descriptor;

	memset(&descriptor, 0, sizeof(descriptor));
	descriptor.type = TYPE_FD;
	descriptor.file.fd = fd;
	return CALL(cuFileHandleRegister, (handle, &descriptor), "register with cuFile", name, err);
}

int cufile_file_take(int fd, const char *name, void **file, struct pen_error *err)
{
	struct registration *place;
	int rc = 0;

	pthread_mutex_lock(&lock);
	place = find_locked(files, FILES_MAX, (uintptr_t)fd);
	if (!place)
		rc = error_set(err, -EMFILE, "register with cuFile", name, -1,
			       "%d files are registered already", FILES_MAX);
	else if (!place->users)
		rc = register_file(fd, name, &place->handle, err);
	if (!rc) {
		place->key = (uintptr_t)fd;
		place->users++;
		*file = place->handle;
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

void cufile_file_put(void *file)
{
	struct registration *place = files;

	pthread_mutex_lock(&lock);
	while (!place->users || place->handle != file)
		place++;
	if (!--place->users)
		api.cuFileHandleDeregister(file);
	pthread_mutex_unlock(&lock);
}

/* --------------------------------------------------------------------------- moving bytes -- */

static const char *verb(const struct cufile_io *io)
{
	return io->write ? "write with cuFile" : "read with cuFile";
}

/* Sort out what a call left in `moved`. `saved` is the errno that belongs to a plain -1. */
static int judge(struct cufile_io *io, ssize_t moved, int saved, struct pen_error *err)
{
	io->moved = 0;
	if (moved >= 0 && (size_t)moved <= io->size) {
		io->moved = moved;
		return 0;
	}
	if (moved >= 0)
		return error_set(err, -EIO, verb(io), io->name, io->offset,
				 "cuFile says it moved %zd of %zu bytes", moved, io->size);
	if (moved == CUFILE_NOT_RUN)
		return error_set(err, -EIO, verb(io), io->name, io->offset,
				 "the GPU's stream failed before the call was executed");
	if (moved == -1)
		return error_sys(err, -saved, verb(io), io->name, io->offset);
	/* Late results carry an errno or a cuFile error, both negated. */
	if (moved > -4096)
		return error_sys(err, (int)moved, verb(io), io->name, io->offset);
	return fail(err, moved < INT32_MIN ? 0 : (int)moved, 0, verb(io), io->name, io->offset);
}

int cufile_move(struct cufile_io *io, struct pen_error *err)
{
	int rc = sys_fault(io->write ? "cuFileWrite" : "cuFileRead");
	ssize_t moved;

	if (rc)
		return error_sys(err, -rc, verb(io), io->name, io->offset);
	errno = 0;
	if (io->write)
		moved = api.cuFileWrite(io->file, io->base, io->size, io->offset, io->base_offset);
	else
		moved = api.cuFileRead(io->file, io->base, io->size, io->offset, io->base_offset);
	return judge(io, moved, errno ? errno : EIO, err);
}

int cufile_stream_open(void *stream, struct pen_error *err)
{
	if (!api.cuFileStreamRegister || !api.cuFileStreamDeregister || !api.cuFileReadAsync ||
	    !api.cuFileWriteAsync)
		return too_old("cuFile's stream calls", err);
	return CALL(cuFileStreamRegister, (stream, STREAM_FIXED), "register a stream with",
		    "cuFile", err);
}

void cufile_stream_close(void *stream)
{
	api.cuFileStreamDeregister(stream);
}

int cufile_stream_move(struct cufile_io *io, void *stream, struct pen_error *err)
{
	int rc;

	io->moved = CUFILE_NOT_RUN;
	if (io->write)
		rc = CALL(cuFileWriteAsync, (io->file, io->base, &io->size, &io->offset,
					     &io->base_offset, &io->moved, stream),
			  verb(io), io->name, err);
	else
		rc = CALL(cuFileReadAsync, (io->file, io->base, &io->size, &io->offset,
					    &io->base_offset, &io->moved, stream),
			  verb(io), io->name, err);
	if (rc && err)
		err->offset = io->offset;
	return rc;
}

int cufile_outcome(struct cufile_io *io, struct pen_error *err)
{
	return judge(io, io->moved, EIO, err);
}

int cufile_batch_open(unsigned int count, void **batch, struct pen_error *err)
{
	int rc;

	*batch = NULL;
	if (!api.cuFileBatchIOSetUp || !api.cuFileBatchIOSubmit || !api.cuFileBatchIOGetStatus ||
	    !api.cuFileBatchIOCancel || !api.cuFileBatchIODestroy)
		return too_old("cuFile's batch calls", err);
	rc = CALL(cuFileBatchIOSetUp, (batch, count), "set up a batch with", "cuFile", err);
	if (rc)
		*batch = NULL;
	return rc;
}

int cufile_batch_submit(void *batch, unsigned int count, struct cufile_batch_entry *batch_entries,
			struct pen_error *err)
{
	return CALL(cuFileBatchIOSubmit, (batch, count, batch_entries, 0), "submit a batch to",
		    "cuFile", err);
}

int cufile_batch_poll(void *batch, unsigned int *count, struct cufile_batch_event *events,
		      uint64_t wait_ns, struct pen_error *err)
{
	struct timespec wait = { (time_t)(wait_ns / 1000000000u), (long)(wait_ns % 1000000000u) };

	return CALL(cuFileBatchIOGetStatus, (batch, wait_ns ? 1 : 0, count, events, &wait),
		    "ask the state of a batch of", "cuFile", err);
}

void cufile_batch_close(void *batch)
{
	/* A cancellation that fails changes nothing: the batch goes either way. */
	api.cuFileBatchIOCancel(batch);
	api.cuFileBatchIODestroy(batch);
}

int cufile_batch_outcome(struct cufile_io *io, const struct cufile_batch_event *event,
			 struct pen_error *err)
{
	ssize_t moved = (ssize_t)event->moved;

	if (event->status == CUFILE_COMPLETE || moved < -1)
		return judge(io, moved, EIO, err);
	return error_set(err, event->status == CUFILE_TIMEOUT ? -ETIMEDOUT :
			 event->status == CUFILE_CANCELED ? -ECANCELED : -EIO,
			 verb(io), io->name, io->offset, "cuFile says the batch entry %s",
			 event->status == CUFILE_TIMEOUT ? "timed out" :
			 event->status == CUFILE_CANCELED ? "was cancelled" :
			 event->status == CUFILE_INVALID ? "is not valid" : "failed");
}
