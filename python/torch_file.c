/* SPDX-License-Identifier: MIT */
/*
 * Files of torch.save as Python objects: records, bytes of small ones, loads and saves. A load is
 * a Job that reads storages to wherever they go, one group each, with an ending (binding.h) that
 * compares digests; a save is a Saving (saving.c). What the pickle means is torch's affair, in
 * penstock/_torch_load.py and _torch_save.py.
 */
#include <errno.h>
#include <stdlib.h>
#include "binding.h"

struct torch_file {
	PyObject_HEAD
	struct pen_torch *handle;
};

static PyTypeObject *torch_file_type;

/* ----------------------------------------------------------------------------------- loads -- */

struct load_ending {
	struct ending ending;
	struct pen_torch_check *check;
};

/* The job's own failure is told rather than what it did to the digests. */
static int load_end(struct ending *self, struct pen_job *job, struct pen_report *report,
		    struct pen_error *err)
{
	struct load_ending *load = (struct load_ending *)self;
	struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;
	int rc = pen_job_wait(job, report, err);
	int mismatch = pen_torch_check_end(load->check, &checked, rc ? NULL : err);

	if (report) {
		report->digested_bytes = checked.verified;
		report->unverified_bytes = checked.unverified;
	}
	free(load);
	return rc ? rc : mismatch;
}

/* A check for what a job is going to read, in its options; NULL with the error. */
static struct load_ending *load_ending_new(struct pen_torch *const *files, size_t count,
					   struct pen_options *options, struct pen_error *err)
{
	struct load_ending *load = calloc(1, sizeof(*load));

	if (!load) {
		*err = (struct pen_error){ .code = -ENOMEM, .raw = ENOMEM, .offset = -1,
					   .operation = "verify", .message = "no memory is left" };
		return NULL;
	}
	load->ending.end = load_end;
	if (pen_torch_check_items(files, count, options, &load->check, err)) {
		free(load);
		return NULL;
	}
	options->digests = pen_torch_check_digests(load->check);
	options->digest_count = 1;
	return load;
}

/* Extents from [(record, address, device)], one group each; NULL with an exception. */
static struct pen_extent *read_wanted(struct torch_file *file, PyObject *list)
{
	struct pen_object *object = pen_torch_object(file->handle);
	Py_ssize_t count = PyList_Size(list);
	const struct pen_torch_record *records;
	size_t record_count = pen_torch_records(file->handle, &records);
	struct pen_extent *extents = new_table(count, sizeof(*extents));

	for (Py_ssize_t i = 0; extents && i < count; i++) {
		unsigned long long address;
		struct device *device;
		Py_ssize_t record;

		if (!PyArg_ParseTuple(PyList_GetItem(list, i), "nKO!", &record, &address,
				      device_type, &device))
			goto failed;
		if (record < 0 || (size_t)record >= record_count) {
			PyErr_SetString(PyExc_IndexError, "there is no such record");
			goto failed;
		}
		extents[i] = (struct pen_extent){
			.object = object,
			.offset = records[record].offset,
			.memory = (void *)(uintptr_t)address,
			.length = records[record].bytes,
			.group = (uint64_t)i,
			.device = device->handle,
		};
	}
	return extents;
failed:
	PyMem_Free(extents);
	return NULL;
}

int torch_start_load(struct pen_torch *const *files, size_t file_count, struct device *device,
		     const struct pen_extent *extents, size_t count,
		     struct pen_options *options, struct job *job, struct pen_error *err)
{
	struct load_ending *load = NULL;
	struct pen_job *handle;
	int rc;

	if (file_count) {
		load = load_ending_new(files, file_count, options, err);
		if (!load)
			return err->code;
	}
	rc = pen_job_start(PEN_READ, device->handle, extents, count, options, &handle, err);
	if (rc && load) {
		pen_torch_check_end(load->check, NULL, NULL);
		free(load);
	}
	if (!rc) {
		job->handle = handle;
		job->ending = load ? &load->ending : NULL;
	}
	return rc;
}

static PyObject *torch_file_load(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "device", "wanted", "keeps", "verify", "transfer", "memory_limit",
				 "streams", "cache", NULL };
	PyObject *wanted, *keeps, *memory_limit = NULL, *streams = NULL, *all;
	struct pen_options options = PEN_OPTIONS_INIT;
	struct torch_file *file = (struct torch_file *)self;
	int verify = true, transfer = PEN_AUTO, cache = PEN_CACHE_AUTO, rc;
	struct pen_extent *extents = NULL;
	struct pen_stream *after = NULL;
	struct job *job = NULL;
	struct device *device;
	struct pen_error err;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O|piOO!i", names, device_type, &device,
					 &PyList_Type, &wanted, &keeps, &verify, &transfer,
					 &memory_limit, &PyList_Type, &streams, &cache) ||
	    !read_options(&options, transfer, memory_limit, NULL, cache))
		return NULL;
	options.groups = (uint64_t)PyList_Size(wanted);
	extents = read_wanted(file, wanted);
	after = extents ? read_streams(streams, &options) : NULL;
	all = after ? PyTuple_Pack(2, self, keeps) : NULL;
	job = all ? job_new(device, all) : NULL;
	Py_XDECREF(all);
	if (job) {
		Py_BEGIN_ALLOW_THREADS
		rc = torch_start_load(&file->handle, verify ? 1 : 0, device, extents,
				      (size_t)options.groups, &options, job, &err);
		Py_END_ALLOW_THREADS
		if (rc) {
			raise_error(&err);
			Py_CLEAR(job);
		}
	}
	PyMem_Free(after);
	PyMem_Free(extents);
	return (PyObject *)job;
}

/* ----------------------------------------------------------------------------------- saves -- */

static void save_poll(void *handle, struct pen_progress *progress)
{
	pen_job_poll(pen_torch_save_job(handle), progress);
}

static void save_cancel(void *handle)
{
	pen_job_cancel(pen_torch_save_job(handle));
}

static int save_wait_for(void *handle, double seconds)
{
	return pen_job_wait_for(pen_torch_save_job(handle), seconds);
}

static int save_wait(void *handle, struct pen_report *report, struct pen_error *err)
{
	return pen_torch_save_wait(handle, report, err);
}

static int save_gathered(void *handle, double seconds)
{
	return pen_torch_save_gathered(handle, seconds);
}

const struct saving_kind torch_saving = {
	.poll = save_poll,
	.cancel = save_cancel,
	.wait_for = save_wait_for,
	.wait = save_wait,
	.gathered = save_gathered,
};

/* Records from [(name, bytes)]: the list keeps what they point to. NULL with an exception. */
static struct pen_torch_part *read_parts(PyObject *list, size_t *count)
{
	struct pen_torch_part *parts = new_table(PyList_Size(list), sizeof(*parts));

	*count = (size_t)PyList_Size(list);
	for (size_t i = 0; parts && i < *count; i++) {
		Py_ssize_t length;

		if (!PyArg_ParseTuple(PyList_GetItem(list, (Py_ssize_t)i), "sy#", &parts[i].name,
				      &parts[i].bytes, &length)) {
			PyMem_Free(parts);
			return NULL;
		}
		parts[i].length = (size_t)length;
	}
	return parts;
}

/* Storages from [(address, length, device)]; NULL with an exception. */
static struct pen_torch_storage *read_storages(PyObject *list, size_t *count)
{
	struct pen_torch_storage *storages = new_table(PyList_Size(list), sizeof(*storages));

	*count = (size_t)PyList_Size(list);
	for (size_t i = 0; storages && i < *count; i++) {
		unsigned long long address, length;
		struct device *device;

		if (!PyArg_ParseTuple(PyList_GetItem(list, (Py_ssize_t)i), "KKO!", &address,
				      &length, device_type, &device)) {
			PyMem_Free(storages);
			return NULL;
		}
		storages[i] = (struct pen_torch_storage){ .memory = (void *)(uintptr_t)address,
							  .bytes = length,
							  .device = device->handle };
	}
	return storages;
}

PyObject *torch_save(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "path", "device", "parts", "storages", "keeps", "transfer",
				 "memory_limit", "streams", "gather", "inject", NULL };
	PyObject *path, *parts, *storages, *keeps, *memory_limit = NULL, *streams = NULL;
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_torch_storage *to_write = NULL;
	struct pen_torch_part *records = NULL;
	struct pen_stream *after = NULL;
	PyObject *saving = NULL, *needs;
	struct pen_torch_save *save;
	int transfer = PEN_AUTO, gather = 0, rc;
	struct device *device;
	struct pen_error err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O!O!O!O|iOO!pz", names,
					 PyUnicode_FSConverter, &path, device_type, &device,
					 &PyList_Type, &parts, &PyList_Type, &storages, &keeps,
					 &transfer, &memory_limit, &PyList_Type, &streams,
					 &gather, &options.inject))
		return NULL;
	if (read_options(&options, transfer, memory_limit, NULL, PEN_CACHE_AUTO))
		records = read_parts(parts, &content.part_count);
	to_write = records ? read_storages(storages, &content.storage_count) : NULL;
	after = to_write ? read_streams(streams, &options) : NULL;
	needs = PyTuple_Pack(2, (PyObject *)device, storages);
	if (after && needs) {
		content.parts = records;
		content.storages = to_write;
		/* All storages are one group. */
		options.groups = gather ? 1 : 0;
		Py_BEGIN_ALLOW_THREADS
		rc = pen_torch_save_start(PyBytes_AsString(path), device->handle, &content,
					  &options, &save, &err);
		Py_END_ALLOW_THREADS
		saving = rc ? raise_error(&err) : saving_new(&torch_saving, save, keeps, needs);
	}
	Py_XDECREF(needs);
	PyMem_Free(after);
	PyMem_Free(to_write);
	PyMem_Free(records);
	Py_DECREF(path);
	return saving;
}

/* ------------------------------------------------------------------------------- TorchFile -- */

static PyObject *torch_file_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "path", NULL };
	struct torch_file *self;
	struct pen_error err;
	PyObject *path;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&", names, PyUnicode_FSConverter, &path))
		return NULL;
	self = new_object(type, sizeof(*self));
	if (!self) {
		Py_DECREF(path);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS
	rc = pen_torch_open(PyBytes_AsString(path), &self->handle, &err);
	Py_END_ALLOW_THREADS
	Py_DECREF(path);
	if (rc) {
		Py_DECREF((PyObject *)self);
		return raise_error(&err);
	}
	return (PyObject *)self;
}

static void torch_file_dealloc(PyObject *self)
{
	struct pen_torch *handle = ((struct torch_file *)self)->handle;

	Py_BEGIN_ALLOW_THREADS
	pen_torch_close(handle);
	Py_END_ALLOW_THREADS
	free_object(self);
}

static PyObject *torch_file_records(PyObject *self, PyObject *unused)
{
	const struct pen_torch_record *records;
	size_t count = pen_torch_records(((struct torch_file *)self)->handle, &records);
	PyObject *dict = PyDict_New();

	(void)unused;
	for (size_t i = 0; dict && i < count; i++) {
		PyObject *name = PyUnicode_DecodeFSDefault(records[i].name);
		PyObject *entry = Py_BuildValue("(nK)", (Py_ssize_t)i,
						(unsigned long long)records[i].bytes);

		if (!name || !entry || PyDict_SetItem(dict, name, entry))
			Py_CLEAR(dict);
		Py_XDECREF(name);
		Py_XDECREF(entry);
	}
	return dict;
}

PyObject *torch_record_bytes(const struct pen_torch *file, const struct pen_torch_record *record)
{
	PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)record->bytes);
	char *content = bytes ? PyBytes_AsString(bytes) : NULL;
	struct pen_error err;
	int rc;

	if (!bytes)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_torch_read(file, record, content, &err);
	Py_END_ALLOW_THREADS
	if (!rc)
		return bytes;
	Py_DECREF(bytes);
	return raise_error(&err);
}

static PyObject *torch_file_read(PyObject *self, PyObject *argument)
{
	const struct pen_torch *file = ((struct torch_file *)self)->handle;
	const struct pen_torch_record *records;
	size_t count = pen_torch_records(file, &records);
	Py_ssize_t index = PyLong_AsSsize_t(argument);

	if (PyErr_Occurred())
		return NULL;
	if (index < 0 || (size_t)index >= count) {
		PyErr_SetString(PyExc_IndexError, "there is no such record");
		return NULL;
	}
	return torch_record_bytes(file, &records[index]);
}

static PyObject *torch_file_locations(PyObject *self, PyObject *unused)
{
	struct pen_torch *file = ((struct torch_file *)self)->handle;
	const struct pen_torch_tensor *tensors;
	PyObject *dict = PyDict_New();
	struct pen_error err;
	size_t count;
	int rc;

	(void)unused;
	if (!dict)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_torch_tensors(file, &tensors, &count, &err);
	Py_END_ALLOW_THREADS
	if (rc) {
		Py_DECREF(dict);
		return raise_error(&err);
	}
	for (size_t i = 0; dict && i < count; i++) {
		PyObject *record = PyLong_FromSize_t(tensors[i].record);
		PyObject *location = PyUnicode_DecodeFSDefault(tensors[i].location);

		if (!record || !location || PyDict_SetItem(dict, record, location))
			Py_CLEAR(dict);
		Py_XDECREF(record);
		Py_XDECREF(location);
	}
	return dict;
}

static PyObject *torch_file_verify(PyObject *self, PyObject *unused)
{
	struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;
	struct pen_error err;
	int rc;

	(void)unused;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_torch_verify(((struct torch_file *)self)->handle, NULL, &checked, &err);
	Py_END_ALLOW_THREADS
	if (rc)
		return raise_error(&err);
	return Py_BuildValue("(KK)", (unsigned long long)checked.verified,
			     (unsigned long long)checked.unverified);
}

static PyMethodDef torch_file_methods[] = {
	{ "records", torch_file_records, METH_NOARGS,
	  "{name: (index, bytes)} in the order of offsets." },
	{ "read", torch_file_read, METH_O, "read(index) -> bytes of a small record, verified." },
	{ "locations", torch_file_locations, METH_NOARGS,
	  "{index: device} of records that are storages of tensors, when they were saved." },
	{ "verify", torch_file_verify, METH_NOARGS,
	  "Read all of it, and compare: (bytes verified, bytes without sums)." },
	{ "load", (PyCFunction)(void (*)(void))torch_file_load, METH_VARARGS | METH_KEYWORDS,
	  "load(device, wanted, keeps, verify=True, transfer=0, memory_limit=None, streams=[], "
	  "cache=0) -> Job; wanted: [(record, address, device)], each a group; a stream is "
	  "(device, handle)." },
	{ NULL },
};

static PyType_Slot torch_file_slots[] = {
	{ Py_tp_doc, "TorchFile(path): the records of a zip file that torch.save wrote." },
	{ Py_tp_new, torch_file_new },
	{ Py_tp_dealloc, torch_file_dealloc },
	{ Py_tp_methods, torch_file_methods },
	{ 0, NULL },
};

bool torch_file_init(PyObject *module)
{
	return type_add(module, &torch_file_type, MODULE "TorchFile", sizeof(struct torch_file),
			torch_file_slots, 0);
}
