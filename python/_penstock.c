/* SPDX-License-Identifier: MIT */
/*
 * The extension module: devices, memory, objects, models and jobs as Python objects. See binding.h
 * for what it is and is not, arrays.c for what other frameworks see.
 *
 * Rules
 *   1. Whatever may wait runs without the GIL, in slices short enough that Ctrl-C is noticed. So
 *      does the freeing of what may be large or on a GPU; what is freed is taken out of its object
 *      first.
 *   2. A job is used by one waiting thread at a time (`waiting`); cancel() and progress() keep the
 *      GIL and look at `handle` first, so they never meet a job that is gone.
 *   3. Who lets go of the GIL with a job in hand has a reference to it, or is the last to know it.
 *   4. Lanes never enter Python.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/text.h"
#include "binding.h"

/* Host memory of this size takes longer to free than the GIL takes to be had again. */
#define FREED_SLOWLY ((uint64_t)1 << 20)

struct object {
	PyObject_HEAD
	struct pen_object *handle;
};

struct model {
	PyObject_HEAD
	struct pen_model *handle;
};

/* Tensors, or boxes of tensors, of one model. */
struct selection {
	PyObject_HEAD
	struct model *model;
	struct pen_placement *placements;
	uint64_t *boxes;	/* what start and stop of the placements point into */
	uint64_t *bytes;
	size_t count;
	uint64_t total;		/* of all, laid out one after the other */
};

PyTypeObject *device_type, *memory_type;
static PyTypeObject *object_type, *model_type, *selection_type, *job_type;
static struct job *under_way;

/* --------------------------------------------------------------------------------- errors -- */

static PyObject *text(const char *bytes)
{
	return PyUnicode_DecodeFSDefault(bytes);
}

PyObject *raise_error(const struct pen_error *err)
{
	/* The class is written in Python, where subclassing and pickling are easier. */
	PyObject *module = PyImport_ImportModule("penstock._error"), *error = NULL;

	if (module)
		error = PyObject_CallMethod(module, "from_engine", "(isiNNLNN)", err->code,
					    pen_domain_name(err->domain), err->raw,
					    text(err->operation), text(err->object),
					    (long long)err->offset, text(err->message),
					    text(err->hint));
	if (error)
		PyErr_SetObject((PyObject *)Py_TYPE(error), error);
	Py_XDECREF(error);
	Py_XDECREF(module);
	return NULL;
}

bool type_add(PyObject *module, PyTypeObject **type, const char *name, size_t size,
	      PyType_Slot *slots, unsigned int flags)
{
	PyType_Spec spec = {
		.name = name,
		.basicsize = (int)size,
		.flags = Py_TPFLAGS_DEFAULT | flags,
		.slots = slots,
	};

	*type = (PyTypeObject *)PyType_FromSpec(&spec);
	return *type && !PyModule_AddObjectRef(module, strrchr(name, '.') + 1, (PyObject *)*type);
}

void free_object(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	PyObject_Free(self);
	Py_DECREF((PyObject *)type);
}

void *new_object(PyTypeObject *type, size_t size)
{
	PyObject *self = (PyObject *)PyObject_New(struct device, type);

	if (self)
		memset((char *)self + sizeof(PyObject), 0, size - sizeof(PyObject));
	return self;
}

/* --------------------------------------------------------------------------------- Device -- */

bool device_is_host(const struct pen_device *device)
{
	return !strcmp(pen_device_name(device), "host");
}

int device_index(const struct pen_device *device)
{
	const char *colon = strchr(pen_device_name(device), ':');

	return colon ? atoi(colon + 1) : 0;
}

static PyObject *device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "name", NULL };
	struct pen_error err;
	struct device *self;
	const char *name;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s", names, &name))
		return NULL;
	self = new_object(type, sizeof(*self));
	if (!self)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_device_open(name, &self->handle, &err);
	Py_END_ALLOW_THREADS
	if (rc) {
		Py_DECREF((PyObject *)self);
		return raise_error(&err);
	}
	return (PyObject *)self;
}

static void device_dealloc(PyObject *self)
{
	struct pen_device *handle = ((struct device *)self)->handle;

	Py_BEGIN_ALLOW_THREADS
	pen_device_close(handle);
	Py_END_ALLOW_THREADS
	free_object(self);
}

static PyObject *device_ready(PyObject *self, PyObject *unused)
{
	struct pen_error err;
	int rc;

	(void)unused;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_device_ready(((struct device *)self)->handle, &err);
	Py_END_ALLOW_THREADS
	if (rc)
		return raise_error(&err);
	Py_RETURN_NONE;
}

static PyObject *device_name(PyObject *self, void *unused)
{
	(void)unused;
	return PyUnicode_FromString(pen_device_name(((struct device *)self)->handle));
}

static PyMethodDef device_methods[] = {
	{ "ready", device_ready, METH_NOARGS, "Wait until the device can take bytes." },
	{ NULL },
};

static PyGetSetDef device_getset[] = {
	{ "name", device_name, NULL, "host or cuda:N.", NULL },
	{ NULL },
};

static PyType_Slot device_slots[] = {
	{ Py_tp_doc, "Device(name): host or cuda:N; a GPU comes up in the background." },
	{ Py_tp_new, device_new },
	{ Py_tp_dealloc, device_dealloc },
	{ Py_tp_methods, device_methods },
	{ Py_tp_getset, device_getset },
	{ 0, NULL },
};

/* --------------------------------------------------------------------------------- Memory -- */

/* Free what a device gave or the kernel mapped. */
static void give_back(struct pen_device *device, void *address, uint64_t size, bool mapped)
{
	if (mapped)
		munmap(address, size);
	else
		pen_device_free(device, address, size, NULL);
}

/* The same with the GIL in hand, which is kept where that is sooner over than to get it back. */
static void free_memory(struct pen_device *device, void *address, uint64_t size, bool mapped)
{
	if (device_is_host(device) && size < FREED_SLOWLY) {
		give_back(device, address, size, mapped);
		return;
	}
	Py_BEGIN_ALLOW_THREADS
	give_back(device, address, size, mapped);
	Py_END_ALLOW_THREADS
}

/* A block with one holder. NULL with an exception; the memory is still the caller's then. */
static struct block *block_new(struct pen_device *device, void *address, uint64_t size,
			       bool mapped)
{
	struct block *block = malloc(sizeof(*block));
	struct pen_error err;

	if (!block) {
		PyErr_NoMemory();
		return NULL;
	}
	*block = (struct block){ .address = address, .size = size, .mapped = mapped };
	if (pen_device_open(pen_device_name(device), &block->device, &err)) {
		free(block);
		raise_error(&err);
		return NULL;
	}
	atomic_init(&block->uses, 1);
	block->readers_of = getpid();
	return block;
}

struct block *block_hold(struct block *block)
{
	atomic_fetch_add_explicit(&block->uses, 1, memory_order_relaxed);
	return block;
}

static void block_free(struct block *block)
{
	give_back(block->device, block->address, block->size, block->mapped);
	pen_device_close(block->device);
	free(block);
}

void block_release(struct block *block)
{
	uint64_t left = atomic_fetch_sub_explicit(&block->uses, 1, memory_order_acq_rel) - 1;

	/* Readers that a fork left behind with the parent will never let go here. */
	if (!left || (!(left % BLOCK_READER) && block->readers_of != getpid()))
		block_free(block);
}

void block_hold_reader(struct block *block)
{
	atomic_fetch_add_explicit(&block->uses, BLOCK_READER, memory_order_relaxed);
}

void block_release_reader(struct block *block)
{
	if (atomic_fetch_sub_explicit(&block->uses, BLOCK_READER, memory_order_acq_rel) ==
	    BLOCK_READER)
		block_free(block);
}

bool block_is_held(struct block *block)
{
	return atomic_load_explicit(&block->uses, memory_order_relaxed) % BLOCK_READER;
}

bool block_has_readers(struct block *block)
{
	return atomic_load_explicit(&block->uses, memory_order_relaxed) >= BLOCK_READER;
}

void block_forget_readers(struct block *block)
{
	uint64_t uses = atomic_load_explicit(&block->uses, memory_order_relaxed);

	if (block->readers_of == getpid())
		return;
	atomic_fetch_sub_explicit(&block->uses, uses - uses % BLOCK_READER, memory_order_relaxed);
	block->readers_of = getpid();
}

PyObject *memory_wrap(struct pen_device *device, void *address, uint64_t size, bool mapped)
{
	struct memory *self = new_object(memory_type, sizeof(*self));

	if (self)
		self->block = block_new(device, address, size, mapped);
	if (!self || !self->block) {
		free_memory(device, address, size, mapped);
		Py_XDECREF((PyObject *)self);
		return NULL;
	}
	return (PyObject *)self;
}

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "device", "size", NULL };
	struct device *device;
	struct pen_error err;
	unsigned long long size;
	void *address;
	int rc;

	(void)type;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!K", names, device_type, &device, &size))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_device_alloc(device->handle, size, &address, &err);
	Py_END_ALLOW_THREADS
	return rc ? raise_error(&err) : memory_wrap(device->handle, address, size, false);
}

static void memory_dealloc(PyObject *self)
{
	struct block *block = ((struct memory *)self)->block;

	if (block && device_is_host(block->device) && block->size < FREED_SLOWLY) {
		block_release(block);
	} else if (block) {
		Py_BEGIN_ALLOW_THREADS
		block_release(block);
		Py_END_ALLOW_THREADS
	}
	free_object(self);
}

static PyObject *memory_array(PyObject *self, PyObject *args)
{
	unsigned long long offset;
	PyObject *shape;
	int dtype;

	if (!PyArg_ParseTuple(args, "KiO", &offset, &dtype, &shape))
		return NULL;
	return array_new((struct memory *)self, offset, dtype, shape);
}

static PyObject *memory_get_address(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromVoidPtr(((struct memory *)self)->block->address);
}

static PyObject *memory_get_size(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(((struct memory *)self)->block->size);
}

static PyMethodDef memory_methods[] = {
	{ "array", memory_array, METH_VARARGS,
	  "array(offset, dtype, shape) -> Array; dtype is an index into DTYPES." },
	{ "read_ahead", memory_read_ahead, METH_VARARGS,
	  "read_ahead([(offset, length)], told) -> bool: have pages of a mapped file brought in, "
	  "if some are not in the page cache, which the kernel tells some; were there any?" },
	{ "reading", memory_reading, METH_NOARGS, "Are pages still being brought in?" },
	{ NULL },
};

static PyGetSetDef memory_getset[] = {
	{ "address", memory_get_address, NULL, "Where the first byte is.", NULL },
	{ "size", memory_get_size, NULL, "Bytes.", NULL },
	{ NULL },
};

static PyType_Slot memory_slots[] = {
	{ Py_tp_doc, "Memory(device, size): freed when nothing looks into it any more." },
	{ Py_tp_new, memory_new },
	{ Py_tp_dealloc, memory_dealloc },
	{ Py_tp_methods, memory_methods },
	{ Py_tp_getset, memory_getset },
	{ 0, NULL },
};

/* --------------------------------------------------------------------------------- Object -- */

static PyObject *object_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "path", "mode", "size", NULL };
	unsigned long long size = 0;
	struct pen_error err;
	struct object *self;
	PyObject *path;
	int mode, rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&i|K", names, PyUnicode_FSConverter,
					 &path, &mode, &size))
		return NULL;
	self = new_object(type, sizeof(*self));
	if (!self) {
		Py_DECREF(path);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS
	rc = pen_object_open(PyBytes_AsString(path), (enum pen_mode)mode, size, &self->handle,
			     &err);
	Py_END_ALLOW_THREADS
	Py_DECREF(path);
	if (rc) {
		Py_DECREF((PyObject *)self);
		return raise_error(&err);
	}
	return (PyObject *)self;
}

static void object_close_handle(struct object *object)
{
	struct pen_object *handle = object->handle;

	object->handle = NULL;
	Py_BEGIN_ALLOW_THREADS
	pen_object_close(handle);
	Py_END_ALLOW_THREADS
}

static void object_dealloc(PyObject *self)
{
	object_close_handle((struct object *)self);
	free_object(self);
}

static bool object_is_open(struct object *object)
{
	if (!object->handle)
		PyErr_SetString(PyExc_ValueError, "the object is closed");
	return object->handle;
}

static PyObject *object_commit(PyObject *self, PyObject *unused)
{
	struct object *object = (struct object *)self;
	struct pen_error err;
	int rc;

	(void)unused;
	if (!object_is_open(object))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_object_commit(object->handle, &err);
	Py_END_ALLOW_THREADS
	if (rc)
		return raise_error(&err);
	Py_RETURN_NONE;
}

static PyObject *object_close(PyObject *self, PyObject *unused)
{
	(void)unused;
	object_close_handle((struct object *)self);
	Py_RETURN_NONE;
}

static PyObject *object_size(PyObject *self, void *unused)
{
	(void)unused;
	if (!object_is_open((struct object *)self))
		return NULL;
	return PyLong_FromUnsignedLongLong(pen_object_size(((struct object *)self)->handle));
}

static PyMethodDef object_methods[] = {
	{ "commit", object_commit, METH_NOARGS, "Make what was written durable and visible." },
	{ "close", object_close, METH_NOARGS, "Close; wait for its jobs first." },
	{ NULL },
};

static PyGetSetDef object_getset[] = {
	{ "size", object_size, NULL, "Bytes.", NULL },
	{ NULL },
};

static PyType_Slot object_slots[] = {
	{ Py_tp_doc, "Object(path, mode, size=0): mode 1 reads, 2 writes anew, 3 in place." },
	{ Py_tp_new, object_new },
	{ Py_tp_dealloc, object_dealloc },
	{ Py_tp_methods, object_methods },
	{ Py_tp_getset, object_getset },
	{ 0, NULL },
};

/* ------------------------------------------------------------------------------------ Job -- */

bool read_options(struct pen_options *options, int transfer, PyObject *memory_limit,
		  PyObject *stream, int cache)
{
	options->transfer = transfer;
	options->cache = cache;
	if (memory_limit && PyUnicode_Check(memory_limit) &&
	    !PyUnicode_CompareWithASCIIString(memory_limit, "auto"))
		options->memory_limit = PEN_MEMORY_AUTO;
	else if (memory_limit && memory_limit != Py_None)
		options->memory_limit = PyLong_AsUnsignedLongLong(memory_limit);
	if (stream && stream != Py_None)
		options->stream = PyLong_AsVoidPtr(stream);
	return !PyErr_Occurred();
}

void *new_table(Py_ssize_t count, size_t size)
{
	void *table = PyMem_Calloc((size_t)(count ? count : 1), size);

	return table ? table : PyErr_NoMemory();
}

struct pen_stream *read_streams(PyObject *list, struct pen_options *options)
{
	Py_ssize_t count = list ? PyList_Size(list) : 0;
	struct pen_stream *streams = count < 0 ? NULL : new_table(count, sizeof(*streams));

	for (Py_ssize_t i = 0; streams && i < count; i++) {
		unsigned long long stream;
		struct device *device;

		if (!PyArg_ParseTuple(PyList_GetItem(list, i), "O!K", device_type, &device,
				      &stream)) {
			PyMem_Free(streams);
			return NULL;
		}
		streams[i] = (struct pen_stream){ .device = device->handle,
						  .stream = (void *)(uintptr_t)stream };
	}
	options->streams = streams;
	options->stream_count = (size_t)count;
	return streams;
}

struct job *job_new(struct device *device, PyObject *keeps)
{
	struct job *job = new_object(job_type, sizeof(*job));

	if (job) {
		job->device = (struct device *)Py_NewRef((PyObject *)device);
		job->keeps = Py_NewRef(keeps);
		job->next = under_way;
		under_way = job;
	}
	return job;
}

static void forget(struct job *job)
{
	struct job **link = &under_way;

	while (*link && *link != job)
		link = &(*link)->next;
	if (*link)
		*link = job->next;
}

/* Wait for the end and let go of the handle. From here on nobody else finds the job by the list;
 * the caller sees to it that the job outlives the call. */
static int finish(struct job *job, struct pen_report *report, struct pen_error *err)
{
	struct pen_job *handle = job->handle;
	struct ending *ending = job->ending;
	int rc;

	job->handle = NULL;
	job->ending = NULL;
	job->waiting = true;
	forget(job);
	Py_BEGIN_ALLOW_THREADS
	rc = ending ? ending->end(ending, handle, report, err) : pen_job_wait(handle, report, err);
	Py_END_ALLOW_THREADS
	job->waiting = false;
	return rc;
}

static void job_dealloc(PyObject *self)
{
	struct job *job = (struct job *)self;

	if (job->handle) {
		pen_job_cancel(job->handle);
		finish(job, NULL, NULL);
	}
	forget(job);
	if (job->allocated)
		free_memory(job->device->handle, job->allocated, job->allocate, false);
	Py_XDECREF((PyObject *)job->device);
	Py_XDECREF(job->keeps);
	free_object(self);
}

static PyObject *paths(const struct pen_path *paths, uint32_t count)
{
	PyObject *list = PyList_New(0);

	for (uint32_t i = 0; list && i < count; i++) {
		PyObject *entry = Py_BuildValue("(sKN)", paths[i].path,
						(unsigned long long)paths[i].bytes,
						text(paths[i].reason));

		if (!entry || PyList_Append(list, entry))
			Py_CLEAR(list);
		Py_XDECREF(entry);
	}
	return list;
}

#define U64(value) ((unsigned long long)(value))

PyObject *report_dict(const struct pen_report *report)
{
	static const char *const gathering[] = {
		[PEN_GATHERING_NONE] = "", [PEN_GATHERING_AHEAD] = "ahead",
		[PEN_GATHERING_STREAMED] = "streamed",
	};

	return Py_BuildValue(
		"{s:K,s:K,s:d,s:d,s:d,s:d,s:K,s:s,s:I,s:K,s:K,s:K,s:I,s:d,s:d,s:d,s:d,s:N,s:N,s:K,"
		"s:s,s:K,s:K,s:s,s:d,s:d,s:K,s:K,s:K,s:d,s:K,s:K}",
		"bytes", U64(report->bytes), "storage_bytes", U64(report->storage_bytes),
		"seconds", report->seconds, "setup_seconds", report->setup_seconds, "gb_per_s",
		report->gb_per_s, "cpu_seconds", report->cpu_seconds, "pinned_bytes",
		U64(report->pinned_bytes), "device", report->device, "lanes", report->lanes,
		"requests", U64(report->requests), "retries", U64(report->retries), "request_size",
		U64(report->request_size), "depth", report->depth, "latency_us_p50",
		report->latency_us_p50, "latency_us_p95", report->latency_us_p95, "latency_us_p99",
		report->latency_us_p99, "latency_us_max", report->latency_us_max, "paths",
		paths(report->paths, report->path_count), "refused",
		paths(report->refused, report->refused_count), "warming_bytes",
		U64(report->warming_bytes), "cache_reason", report->cache_reason,
		"digested_bytes", U64(report->digested_bytes), "unverified_bytes",
		U64(report->unverified_bytes), "gathering", gathering[report->gathering],
		"gathered_seconds", report->gathered_seconds, "stored_seconds",
		report->stored_seconds, "made_bytes", U64(report->made_bytes),
		"delivered_bytes", U64(report->delivered_bytes), "coded_bytes",
		U64(report->coded_bytes), "decode_seconds", report->decode_seconds,
		"device_staging_bytes", U64(report->device_staging_bytes),
		"core_decoded_bytes", U64(report->core_decoded_bytes));
}

/* One thread waits at a time; false with an exception. */
static bool begin_waiting(struct job *job)
{
	if (!job->handle) {
		PyErr_SetString(PyExc_ValueError, "the job was waited for already");
		return false;
	}
	if (job->waiting) {
		PyErr_SetString(PyExc_RuntimeError, "another thread waits for this job");
		return false;
	}
	job->waiting = true;
	return true;
}

/* The rest of a job whose waiting was interrupted: stop it, keep the exception. */
static PyObject *give_up(struct job *job)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	pen_job_cancel(job->handle);
	finish(job, NULL, NULL);
	PyErr_Restore(type, value, trace);
	return NULL;
}

static PyObject *job_wait(PyObject *self, PyObject *unused)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct job *job = (struct job *)self;
	struct pen_error err;
	int rc;

	(void)unused;
	if (!begin_waiting(job))
		return NULL;
	do {
		Py_BEGIN_ALLOW_THREADS
		rc = pen_job_wait_for(job->handle, SIGNALS_EVERY);
		Py_END_ALLOW_THREADS
		if (PyErr_CheckSignals())
			return give_up(job);
	} while (rc);
	rc = finish(job, &report, &err);
	Py_CLEAR(job->keeps);
	return rc ? raise_error(&err) : report_dict(&report);
}

static PyObject *job_wait_for(PyObject *self, PyObject *argument)
{
	double seconds = PyFloat_AsDouble(argument);
	struct job *job = (struct job *)self;
	int rc;

	if (PyErr_Occurred() || !begin_waiting(job))
		return NULL;
	if (seconds > SIGNALS_EVERY)
		seconds = SIGNALS_EVERY;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_job_wait_for(job->handle, seconds);
	Py_END_ALLOW_THREADS
	if (PyErr_CheckSignals())
		return give_up(job);
	job->waiting = false;
	return PyBool_FromLong(!rc);
}

static PyObject *job_landed(PyObject *self, PyObject *unused)
{
	struct job *job = (struct job *)self;
	uint64_t groups[64];
	PyObject *list;
	size_t count;
	int ended;

	(void)unused;
	if (!begin_waiting(job))
		return NULL;
	do {
		Py_BEGIN_ALLOW_THREADS
		/* Asked first: nothing lands after the end, so an empty answer is the last. */
		ended = !pen_job_wait_for(job->handle, 0);
		count = pen_job_landed(job->handle, groups, 64, SIGNALS_EVERY);
		Py_END_ALLOW_THREADS
		if (PyErr_CheckSignals())
			return give_up(job);
	} while (!count && !ended);
	job->waiting = false;
	list = PyList_New((Py_ssize_t)count);
	for (size_t i = 0; list && i < count; i++) {
		PyObject *number = PyLong_FromUnsignedLongLong(groups[i]);

		if (!number)
			Py_CLEAR(list);
		else
			PyList_SetItem(list, (Py_ssize_t)i, number);
	}
	return list;
}

static PyObject *job_progress(PyObject *self, PyObject *unused)
{
	struct job *job = (struct job *)self;
	struct pen_progress progress;

	(void)unused;
	if (!job->handle) {
		PyErr_SetString(PyExc_ValueError, "the job was waited for already");
		return NULL;
	}
	pen_job_poll(job->handle, &progress);
	return Py_BuildValue("(KKd)", U64(progress.bytes), U64(progress.total), progress.seconds);
}

static PyObject *job_cancel(PyObject *self, PyObject *unused)
{
	struct job *job = (struct job *)self;

	(void)unused;
	if (job->handle)
		pen_job_cancel(job->handle);
	Py_RETURN_NONE;
}

static PyObject *job_memory(PyObject *self, PyObject *unused)
{
	struct job *job = (struct job *)self;
	void *allocated = job->allocated;

	(void)unused;
	if (job->handle || job->waiting || !allocated) {
		PyErr_SetString(PyExc_ValueError, "the job has no memory to give");
		return NULL;
	}
	job->allocated = NULL;
	return memory_wrap(job->device->handle, allocated, job->allocate, false);
}

static PyMethodDef job_methods[] = {
	{ "wait", job_wait, METH_NOARGS, "Wait for the end; the report as a dict." },
	{ "wait_for", job_wait_for, METH_O, "Wait for the end, at most so long; has it come?" },
	{ "landed", job_landed, METH_NOARGS,
	  "Tags that are complete and were not told yet; waits for one; empty at the end." },
	{ "progress", job_progress, METH_NOARGS, "(bytes, total, seconds) so far." },
	{ "cancel", job_cancel, METH_NOARGS, "Ask the job to stop; wait() then raises." },
	{ "memory", job_memory, METH_NOARGS, "The Memory that the job allocated, once." },
	{ NULL },
};

static PyType_Slot job_slots[] = {
	{ Py_tp_doc, "Bytes on the move. One that is let go of is stopped." },
	{ Py_tp_dealloc, job_dealloc },
	{ Py_tp_methods, job_methods },
	{ 0, NULL },
};

/* One extent from (object, offset, address, length). */
static bool read_extent(PyObject *item, struct pen_extent *extent)
{
	unsigned long long offset, address, length;
	struct object *object;

	if (!PyArg_ParseTuple(item, "O!KKK", object_type, &object, &offset, &address, &length) ||
	    !object_is_open(object))
		return false;
	*extent = (struct pen_extent){
		.object = object->handle,
		.offset = offset,
		.memory = (void *)(uintptr_t)address,
		.length = length,
	};
	return true;
}

static PyObject *start(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "direction", "device", "extents", "keeps", "transfer",
				 "memory_limit", "stream", "cache", NULL };
	struct pen_options options = PEN_OPTIONS_INIT;
	PyObject *list, *keeps, *memory_limit = NULL, *stream = NULL, *all;
	int direction, transfer = PEN_AUTO, cache = PEN_CACHE_AUTO, rc;
	struct pen_job *handle = NULL;
	struct pen_extent *extents;
	struct device *device;
	struct pen_error err;
	Py_ssize_t count;
	struct job *job;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO!O!O|iOOi", names, &direction,
					 device_type, &device, &PyList_Type, &list, &keeps,
					 &transfer, &memory_limit, &stream, &cache) ||
	    !read_options(&options, transfer, memory_limit, stream, cache))
		return NULL;
	count = PyList_Size(list);
	extents = PyMem_Calloc((size_t)(count ? count : 1), sizeof(extents[0]));
	if (!extents)
		return PyErr_NoMemory();
	for (Py_ssize_t i = 0; i < count; i++)
		if (!read_extent(PyList_GetItem(list, i), &extents[i])) {
			PyMem_Free(extents);
			return NULL;
		}
	all = PyTuple_Pack(2, list, keeps);
	job = all ? job_new(device, all) : NULL;
	Py_XDECREF(all);
	if (!job) {
		PyMem_Free(extents);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS
	rc = pen_job_start((enum pen_mode)direction, device->handle, extents, (size_t)count,
			   &options, &handle, &err);
	Py_END_ALLOW_THREADS
	job->handle = handle;
	PyMem_Free(extents);
	if (rc) {
		Py_DECREF((PyObject *)job);
		return raise_error(&err);
	}
	return (PyObject *)job;
}

/* ---------------------------------------------------------------------------------- Model -- */

/* The names of a tuple, or one name alone, as the system wants them: a tuple of bytes. */
static PyObject *encode_names(PyObject *names)
{
	bool listed = PyTuple_Check(names);
	Py_ssize_t count = listed ? PyTuple_Size(names) : 1;
	PyObject *encoded = PyTuple_New(count);

	for (Py_ssize_t i = 0; encoded && i < count; i++) {
		PyObject *bytes;

		if (PyUnicode_FSConverter(listed ? PyTuple_GetItem(names, i) : names, &bytes))
			PyTuple_SetItem(encoded, i, bytes);
		else
			Py_CLEAR(encoded);
	}
	return encoded;
}

static struct model *open_model(PyTypeObject *type, PyObject *encoded, const char **paths,
				bool listed)
{
	size_t count = (size_t)PyTuple_Size(encoded);
	struct model *self = new_object(type, sizeof(*self));
	struct pen_error err;
	int rc;

	if (!self)
		return NULL;
	for (size_t i = 0; i < count; i++)
		paths[i] = PyBytes_AsString(PyTuple_GetItem(encoded, (Py_ssize_t)i));
	Py_BEGIN_ALLOW_THREADS
	rc = listed ? pen_model_open_files(paths, count, &self->handle, &err)
		    : pen_model_open(paths[0], &self->handle, &err);
	Py_END_ALLOW_THREADS
	if (!rc)
		return self;
	Py_DECREF((PyObject *)self);
	raise_error(&err);
	return NULL;
}

static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "path", NULL };
	struct model *self = NULL;
	PyObject *path, *encoded;
	const char **paths;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &path))
		return NULL;
	encoded = encode_names(path);
	if (!encoded)
		return NULL;
	paths = calloc((size_t)PyTuple_Size(encoded) + 1, sizeof(paths[0]));
	if (paths)
		self = open_model(type, encoded, paths, PyTuple_Check(path));
	else
		PyErr_NoMemory();
	free(paths);
	Py_DECREF(encoded);
	return (PyObject *)self;
}

static void model_dealloc(PyObject *self)
{
	struct pen_model *handle = ((struct model *)self)->handle;

	Py_BEGIN_ALLOW_THREADS
	pen_model_close(handle);
	Py_END_ALLOW_THREADS
	free_object(self);
}

static PyObject *numbers(const uint64_t *values, uint32_t count)
{
	PyObject *tuple = PyTuple_New(count);

	for (uint32_t i = 0; tuple && i < count; i++) {
		PyObject *number = PyLong_FromUnsignedLongLong(values[i]);

		if (!number)
			Py_CLEAR(tuple);
		else
			PyTuple_SetItem(tuple, i, number);
	}
	return tuple;
}

/* It may hold a NUL. */
static PyObject *text_of(const char *text, size_t length)
{
	return PyUnicode_FromStringAndSize(text, (Py_ssize_t)length);
}

static PyObject *model_tensors(PyObject *self, PyObject *unused)
{
	const struct pen_tensor *tensors;
	size_t count = pen_model_tensors(((struct model *)self)->handle, &tensors);
	PyObject *list = PyList_New(0);

	(void)unused;
	for (size_t i = 0; list && i < count; i++) {
		const struct pen_tensor *tensor = &tensors[i];
		PyObject *entry = Py_BuildValue("(NiNKIK)", text_of(tensor->name,
								  tensor->name_length),
						tensor->dtype,
						numbers(tensor->shape, tensor->rank),
						U64(tensor->bytes), tensor->file,
						U64(tensor->offset));

		if (!entry || PyList_Append(list, entry))
			Py_CLEAR(list);
		Py_XDECREF(entry);
	}
	return list;
}

static PyObject *metadata(const struct pen_model_file *file)
{
	PyObject *dict = file->metadata ? PyDict_New() : Py_NewRef(Py_None);

	for (size_t i = 0; dict && i < file->metadata_count; i++) {
		const struct pen_metadata *pair = &file->metadata[i];
		PyObject *key = text_of(pair->key, pair->key_length);
		PyObject *value = text_of(pair->value, pair->value_length);

		if (!key || !value || PyDict_SetItem(dict, key, value))
			Py_CLEAR(dict);
		Py_XDECREF(key);
		Py_XDECREF(value);
	}
	return dict;
}

static PyObject *model_files(PyObject *self, PyObject *unused)
{
	const struct pen_model_file *files;
	size_t count = pen_model_files(((struct model *)self)->handle, &files);
	PyObject *list = PyList_New(0);

	(void)unused;
	for (size_t i = 0; list && i < count; i++) {
		PyObject *entry = Py_BuildValue("(NNKKN)", text(files[i].path),
						text(files[i].name), U64(files[i].size),
						U64(files[i].data), metadata(&files[i]));

		if (!entry || PyList_Append(list, entry))
			Py_CLEAR(list);
		Py_XDECREF(entry);
	}
	return list;
}

static PyObject *model_coded(PyObject *self, PyObject *unused)
{
	const struct pen_model_file *files;
	size_t count = pen_model_files(((struct model *)self)->handle, &files);
	bool coded = false;

	(void)unused;
	for (size_t i = 0; i < count; i++)
		coded |= files[i].original != 0;
	return PyBool_FromLong(coded);
}

static PyObject *model_warnings(PyObject *self, PyObject *unused)
{
	const char *const *warnings;
	size_t count = pen_model_warnings(((struct model *)self)->handle, &warnings);
	PyObject *list = PyList_New(0);

	(void)unused;
	for (size_t i = 0; list && i < count; i++) {
		PyObject *entry = text(warnings[i]);

		if (!entry || PyList_Append(list, entry))
			Py_CLEAR(list);
		Py_XDECREF(entry);
	}
	return list;
}

/* Numbers of a tuple into `values`; false with an exception. */
static bool read_numbers(PyObject *tuple, uint64_t *values, uint32_t count)
{
	if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != (Py_ssize_t)count) {
		PyErr_SetString(PyExc_ValueError, "a box has one number for each dimension");
		return false;
	}
	for (uint32_t i = 0; i < count; i++) {
		values[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
		if (PyErr_Occurred())
			return false;
	}
	return true;
}

/* (index, start, stop), with None for the whole tensor, and the dtype that it shall have in memory,
 * if another; `boxes` moves on by what is used. */
static bool read_choice(struct selection *self, size_t at, PyObject *item, uint64_t **boxes)
{
	struct pen_placement *placement = &self->placements[at];
	const struct pen_tensor *tensors;
	size_t count = pen_model_tensors(self->model->handle, &tensors);
	PyObject *start, *stop;
	Py_ssize_t index;
	int dtype = -1, form;

	if (!PyArg_ParseTuple(item, "nOO|i", &index, &start, &stop, &dtype))
		return false;
	if (index < 0 || (size_t)index >= count) {
		PyErr_SetString(PyExc_IndexError, "there is no such tensor");
		return false;
	}
	placement->tensor = &tensors[index];
	form = dtype < 0 ? PEN_FORM_PLAIN : pen_form_find(placement->tensor->dtype, dtype);
	if (form < 0) {
		PyErr_SetString(PyExc_ValueError, "the engine does not convert to this dtype");
		return false;
	}
	placement->form = (uint64_t)form;
	if (start == Py_None)
		return true;
	placement->start = *boxes;
	placement->stop = *boxes + placement->tensor->rank;
	if (!read_numbers(start, *boxes, placement->tensor->rank) ||
	    !read_numbers(stop, *boxes + placement->tensor->rank, placement->tensor->rank))
		return false;
	*boxes += 2 * placement->tensor->rank;
	return true;
}

/* Room for the numbers of all boxes of the list. */
static size_t box_room(PyObject *list, Py_ssize_t count)
{
	size_t room = 1;

	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *item = PyList_GetItem(list, i);
		PyObject *start = PyTuple_Check(item) && PyTuple_Size(item) >= 3
					  ? PyTuple_GetItem(item, 1) : NULL;

		if (start && PyTuple_Check(start))
			room += 2 * (size_t)PyTuple_Size(start);
	}
	return room;
}

static PyObject *model_select(PyObject *self, PyObject *list)
{
	struct selection *made;
	struct pen_error err;
	uint64_t *boxes;
	Py_ssize_t count;

	if (!PyList_Check(list)) {
		PyErr_SetString(PyExc_TypeError, "select() takes a list");
		return NULL;
	}
	made = new_object(selection_type, sizeof(*made));
	if (!made)
		return NULL;
	count = PyList_Size(list);
	made->model = (struct model *)Py_NewRef((PyObject *)self);
	made->count = (size_t)count;
	made->placements = PyMem_Calloc(made->count + 1, sizeof(made->placements[0]));
	made->bytes = PyMem_Calloc(made->count + 1, sizeof(made->bytes[0]));
	made->boxes = boxes = PyMem_Calloc(box_room(list, count), sizeof(made->boxes[0]));
	if (!made->placements || !made->bytes || !boxes) {
		PyErr_NoMemory();
		goto failed;
	}
	for (Py_ssize_t i = 0; i < count; i++)
		if (!read_choice(made, (size_t)i, PyList_GetItem(list, i), &boxes))
			goto failed;
	for (size_t i = 0; i < made->count; i++)
		if (pen_placement_bytes(&made->placements[i], &made->bytes[i], &err)) {
			raise_error(&err);
			goto failed;
		}
	if (pen_placement_layout(made->placements, made->count, &made->total, &err)) {
		raise_error(&err);
		goto failed;
	}
	return (PyObject *)made;
failed:
	Py_DECREF((PyObject *)made);
	return NULL;
}

static PyMethodDef model_methods[] = {
	{ "tensors", model_tensors, METH_NOARGS,
	  "[(name, dtype, shape, nbytes, file, offset)]; dtype is an index into DTYPES." },
	{ "files", model_files, METH_NOARGS, "[(path, name, size, data, metadata)]." },
	{ "coded", model_coded, METH_NOARGS, "Is some file of it packed?" },
	{ "warnings", model_warnings, METH_NOARGS, "What is odd, in words." },
	{ "select", model_select, METH_O, "select([(index, start, stop[, dtype])]) -> Selection." },
	{ NULL },
};

static PyType_Slot model_slots[] = {
	{ Py_tp_doc, "Model(path): the tensors of a safetensors file, a folder or an index, or\n"
	  "of a tuple of files." },
	{ Py_tp_new, model_new },
	{ Py_tp_dealloc, model_dealloc },
	{ Py_tp_methods, model_methods },
	{ 0, NULL },
};

/* ------------------------------------------------------------------------------ Selection -- */

static void selection_dealloc(PyObject *self)
{
	struct selection *selection = (struct selection *)self;

	PyMem_Free(selection->placements);
	PyMem_Free(selection->bytes);
	PyMem_Free(selection->boxes);
	Py_XDECREF((PyObject *)selection->model);
	free_object(self);
}

static PyObject *selection_offsets(PyObject *self, PyObject *unused)
{
	struct selection *selection = (struct selection *)self;
	PyObject *list = PyList_New(0);

	(void)unused;
	for (size_t i = 0; list && i < selection->count; i++) {
		PyObject *entry =
			Py_BuildValue("(KK)", U64((uintptr_t)selection->placements[i].memory),
				      U64(selection->bytes[i]));

		if (!entry || PyList_Append(list, entry))
			Py_CLEAR(list);
		Py_XDECREF(entry);
	}
	return list;
}

static PyObject *selection_total(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(((struct selection *)self)->total);
}

/* One place: an address in the memory of the load's device, or (address, device). */
static void place_at(struct pen_placement *placement, PyObject *where)
{
	struct device *device;
	PyObject *address = where;

	if (PyTuple_Check(where)) {
		if (!PyArg_ParseTuple(where, "OO!", &address, device_type, &device))
			return;
		placement->device = device->handle;
	}
	placement->memory = PyLong_AsVoidPtr(address);
}

/* Where each placement goes: `where` is None (the job allocates), one address (all are laid out
 * from there) or a list with a place for each. NULL with an exception. */
static struct pen_placement *place(struct selection *selection, PyObject *where)
{
	struct pen_placement *placed = new_table((Py_ssize_t)selection->count, sizeof(placed[0]));
	bool each = where != Py_None && PyList_Check(where);
	uintptr_t base = 0;

	if (!placed)
		return NULL;
	if (each && PyList_Size(where) != (Py_ssize_t)selection->count)
		PyErr_SetString(PyExc_ValueError, "there must be one address for each tensor");
	else if (where != Py_None && !each)
		base = (uintptr_t)PyLong_AsVoidPtr(where);
	for (size_t i = 0; i < selection->count && !PyErr_Occurred(); i++) {
		placed[i] = selection->placements[i];
		if (each)
			place_at(&placed[i], PyList_GetItem(where, (Py_ssize_t)i));
		else
			placed[i].memory = (void *)(base + (uintptr_t)placed[i].memory);
	}
	if (!PyErr_Occurred())
		return placed;
	PyMem_Free(placed);
	return NULL;
}

static PyObject *selection_load(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "device", "where", "keeps", "groups", "transfer", "memory_limit",
				 "streams", "cache", NULL };
	struct selection *selection = (struct selection *)self;
	PyObject *where = Py_None, *keeps = Py_None, *memory_limit = NULL, *streams = NULL, *all;
	struct pen_options options = PEN_OPTIONS_INIT;
	int groups = 0, transfer = PEN_AUTO, cache = PEN_CACHE_AUTO, rc;
	struct pen_placement *placed;
	struct pen_job *handle = NULL;
	struct pen_stream *after;
	struct device *device;
	struct pen_error err;
	struct job *job;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|OOpiOO!i", names, device_type, &device,
					 &where, &keeps, &groups, &transfer, &memory_limit,
					 &PyList_Type, &streams, &cache) ||
	    !read_options(&options, transfer, memory_limit, NULL, cache))
		return NULL;
	placed = place(selection, where);
	after = placed ? read_streams(streams, &options) : NULL;
	all = after ? PyTuple_Pack(3, self, keeps, where) : NULL;
	job = all ? job_new(device, all) : NULL;
	Py_XDECREF(all);
	if (!job) {
		PyMem_Free(after);
		PyMem_Free(placed);
		return NULL;
	}
	options.groups = groups ? selection->count : 0;
	if (where == Py_None) {
		/* A job that allocates wants at least a byte to allocate. */
		options.allocate = job->allocate = selection->total ? selection->total : 1;
		options.allocated = &job->allocated;
	}
	Py_BEGIN_ALLOW_THREADS
	rc = pen_load_start(selection->model->handle, device->handle, placed, selection->count,
			    &options, &handle, &err);
	Py_END_ALLOW_THREADS
	job->handle = handle;
	PyMem_Free(after);
	PyMem_Free(placed);
	if (rc) {
		Py_DECREF((PyObject *)job);
		return raise_error(&err);
	}
	return (PyObject *)job;
}

static PyMethodDef selection_methods[] = {
	{ "offsets", selection_offsets, METH_NOARGS, "[(offset, nbytes)] of the common layout." },
	{ "load", (PyCFunction)(void (*)(void))selection_load, METH_VARARGS | METH_KEYWORDS,
	  "load(device, where=None, keeps=None, groups=False, transfer=0, memory_limit=None, "
	  "streams=[], cache=0) -> Job; where: None, an address, or a list of addresses and "
	  "(address, device); a stream is (device, handle)." },
	{ NULL },
};

static PyGetSetDef selection_getset[] = {
	{ "total", selection_total, NULL, "Bytes of the common layout.", NULL },
	{ NULL },
};

static PyType_Slot selection_slots[] = {
	{ Py_tp_doc, "What is to be loaded of a model." },
	{ Py_tp_dealloc, selection_dealloc },
	{ Py_tp_methods, selection_methods },
	{ Py_tp_getset, selection_getset },
	{ 0, NULL },
};

/* --------------------------------------------------------------------------------- module -- */

static PyObject *transfer_type(PyObject *module, PyObject *argument)
{
	PyObject *name = PyObject_Str(argument), *bytes;
	struct pen_error err;
	int type, rc = 0;

	(void)module;
	bytes = name ? PyUnicode_AsUTF8String(name) : NULL;
	Py_XDECREF(name);
	if (!bytes)
		return NULL;
	rc = pen_transfer_parse(PyBytes_AsString(bytes), &type, &err);
	Py_DECREF(bytes);
	return rc ? raise_error(&err) : PyLong_FromLong(type);
}

static PyObject *trim(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	Py_BEGIN_ALLOW_THREADS
	pen_trim();
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

/* Before the interpreter ends: memory that bytes land in is about to go. A job that another thread
 * waits for is that thread's. Nor shall the end wait for what is read into the page cache. */
static PyObject *stop_all(PyObject *module, PyObject *unused)
{
	struct job *job = under_way;

	(void)module;
	(void)unused;
	pen_warming_stop();
	while (job) {
		if (!job->handle || job->waiting) {
			job = job->next;
			continue;
		}
		/* Others may let go of it meanwhile. */
		Py_INCREF((PyObject *)job);
		pen_job_cancel(job->handle);
		finish(job, NULL, NULL);
		Py_DECREF((PyObject *)job);
		job = under_way;
	}
	saving_stop_all();
	Py_RETURN_NONE;
}

/* Foreign text for people, by the one function that knows how. */
static PyObject *escape(PyObject *module, PyObject *bytes)
{
	const char *plain = PyBytes_AsString(bytes);
	size_t size = plain ? TEXT_ESCAPE_GROWTH * strlen(plain) + 1 : 0;
	char *shown = plain ? malloc(size) : NULL;
	PyObject *result;

	(void)module;
	if (!shown)
		return plain ? PyErr_NoMemory() : NULL;
	text_escape(shown, size, plain);
	result = PyUnicode_FromString(shown);
	free(shown);
	return result;
}

static PyMethodDef functions[] = {
	{ "ask_by_type", ask_by_type, METH_O,
	  "ask_by_type(function) -> the same function of one thing, which is asked once about each "
	  "type that it answers with None." },
	{ "escape", escape, METH_O, "escape(bytes) -> str, with nothing a terminal would obey." },
	{ "stop_all", stop_all, METH_NOARGS, "Stop every job and save that nobody waits for." },
	{ "map_file", map_file, METH_VARARGS,
	  "map_file(device, fd, size) -> Memory; what is written to it never reaches the file." },
	{ "layout_safetensors", layout_safetensors, METH_VARARGS,
	  "layout_safetensors(tensors, metadata) -> (header, [(number, bytes), ...] as they lie)" },
	{ "save_safetensors", (PyCFunction)(void (*)(void))save_safetensors,
	  METH_VARARGS | METH_KEYWORDS,
	  "save_safetensors(path, tensors, metadata, align, shard_size, streams, keeps, transfer, "
	  "memory_limit, inject=None) -> Saving; a tensor is (name, dtype, shape, address, "
	  "device), metadata None or [(key, value)], a stream (device, stream)." },
	{ "start", (PyCFunction)(void (*)(void))start, METH_VARARGS | METH_KEYWORDS,
	  "start(direction, device, extents, keeps, transfer=0, memory_limit=None, stream=None, "
	  "cache=0) -> Job; an extent is (object, offset, address, length)." },
	{ "torch_pack", (PyCFunction)(void (*)(void))torch_pack, METH_VARARGS | METH_KEYWORDS,
	  "torch_pack(path, device, items, keeps, transfer=0, memory_limit=None, streams=[], "
	  "gather=False) -> (Saving, [(offset, size)]); an item: bytes, or (data.pkl, address, "
	  "length, device)." },
	{ "torch_save", (PyCFunction)(void (*)(void))torch_save, METH_VARARGS | METH_KEYWORDS,
	  "torch_save(path, device, parts, storages, keeps, transfer=0, memory_limit=None, "
	  "streams=[], inject=None) -> Saving; a part is (name, bytes), a storage (address, "
	  "length, device), a stream (device, handle)." },
	{ "transfer_type", transfer_type, METH_O, "What the engine calls a transfer type." },
	{ "trim", trim, METH_NOARGS, "Give pooled staging memory back to the system." },
	{ "memory_available", available, METH_NOARGS,
	  "Bytes that may still be taken, limits of control groups counted." },
	{ "cache_policy", cache_policy, METH_O, "What the engine calls a word, or None." },
	{ "converts", converts, METH_VARARGS,
	  "converts(dtype, other) -> can the engine make one of the other, on the way?" },
	{ "warming", warming, METH_NOARGS, "(left, brought, given_up, reason)." },
	{ "warming_wait", warming_wait, METH_O, "Wait so many seconds; is nothing left?" },
	{ "checkpoints_open", checkpoints_open, METH_VARARGS,
	  "checkpoints_open(path, write, rank) -> Checkpoints" },
	{ "warming_stop", warming_stop, METH_NOARGS, "Give up what is left." },
	{ NULL },
};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "_penstock",
	.m_doc = "The engine as the package penstock uses it; not for users.",
	.m_size = -1,
	.m_methods = functions,
};

/* [(name, bits)] in the order of enum pen_dtype. */
static int add_dtypes(PyObject *module)
{
	PyObject *list = PyList_New(0);
	int rc;

	for (int i = 0; list && i < PEN_DTYPES; i++) {
		PyObject *entry = Py_BuildValue("(sI)", pen_dtype_name(i), pen_dtype_bits(i));

		if (!entry || PyList_Append(list, entry))
			Py_CLEAR(list);
		Py_XDECREF(entry);
	}
	rc = PyModule_AddObjectRef(module, "DTYPES", list);
	Py_XDECREF(list);
	return rc;
}

static bool add_types(PyObject *module)
{
	return type_add(module, &device_type, MODULE "Device", sizeof(struct device),
			device_slots, 0) &&
	       type_add(module, &memory_type, MODULE "Memory", sizeof(struct memory),
			memory_slots, 0) &&
	       type_add(module, &object_type, MODULE "Object", sizeof(struct object),
			object_slots, 0) &&
	       type_add(module, &model_type, MODULE "Model", sizeof(struct model), model_slots,
			0) &&
	       type_add(module, &selection_type, MODULE "Selection", sizeof(struct selection),
			selection_slots, Py_TPFLAGS_DISALLOW_INSTANTIATION) &&
	       type_add(module, &job_type, MODULE "Job", sizeof(struct job), job_slots,
			Py_TPFLAGS_DISALLOW_INSTANTIATION);
}

PyMODINIT_FUNC PyInit__penstock(void);

PyMODINIT_FUNC PyInit__penstock(void)
{
	PyObject *module = PyModule_Create(&definition);

	if (module && (!add_types(module) || !arrays_init(module) || !saving_init(module) ||
		       !torch_file_init(module) || !torch_pack_init(module) ||
		       !checkpoints_init(module) ||
		       add_dtypes(module) ||
		       PyModule_AddStringConstant(module, "version", pen_version())))
		Py_CLEAR(module);
	return module;
}
