/* SPDX-License-Identifier: MIT */
/*
 * Files of several objects of torch's, as torch.distributed.checkpoint has them, as Python objects:
 * a function that writes one, a Saving (saving.c), and TorchItems, which tells what tensors lie in
 * items of a file and reads any parts of them, in one Job. penstock/dcp.py knows what for.
 */
#include <errno.h>
#include <stdlib.h>
#include "binding.h"

/* ----------------------------------------------------------------------------------- saves -- */

struct pack {
	struct pen_torch_item *items;
	struct pen_torch_storage *storages;	/* one for each item at most */
	size_t count;
};

static void pack_free(struct pack *pack)
{
	PyMem_Free(pack->items);
	PyMem_Free(pack->storages);
}

/* bytes, or (data.pkl, address, length, device); false with an exception. */
static bool read_item(PyObject *from, struct pen_torch_item *item,
		      struct pen_torch_storage *storage)
{
	unsigned long long address, length;
	struct device *device;
	Py_ssize_t size;

	if (PyBytes_Check(from)) {
		item->bytes = PyBytes_AsString(from);
		item->length = (size_t)PyBytes_Size(from);
		item->flags = PEN_TORCH_RAW;
		return true;
	}
	if (!PyArg_ParseTuple(from, "y#KKO!", &item->bytes, &size, &address, &length, device_type,
			      &device))
		return false;
	item->length = (size_t)size;
	*storage = (struct pen_torch_storage){ .memory = (void *)(uintptr_t)address,
					       .bytes = length, .device = device->handle };
	item->storages = storage;
	item->storage_count = 1;
	return true;
}

static bool read_items(PyObject *list, struct pack *pack)
{
	pack->count = (size_t)PyList_Size(list);
	pack->items = PyMem_Calloc(pack->count + 1, sizeof(pack->items[0]));
	pack->storages = PyMem_Calloc(pack->count + 1, sizeof(pack->storages[0]));
	if (!pack->items || !pack->storages)
		return PyErr_NoMemory();
	for (size_t i = 0; i < pack->count; i++)
		if (!read_item(PyList_GetItem(list, (Py_ssize_t)i), &pack->items[i],
			       &pack->storages[i]))
			return false;
	return true;
}

static PyObject *places(const struct pack *pack)
{
	PyObject *list = PyList_New((Py_ssize_t)pack->count);

	for (size_t i = 0; list && i < pack->count; i++) {
		PyObject *place = Py_BuildValue("(KK)", (unsigned long long)pack->items[i].offset,
						(unsigned long long)pack->items[i].size);

		if (!place || PyList_SetItem(list, (Py_ssize_t)i, place) < 0)
			Py_CLEAR(list);
	}
	return list;
}

PyObject *torch_pack(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "path", "device", "items", "keeps", "transfer", "memory_limit",
				 "streams", "gather", NULL };
	PyObject *path, *items, *keeps, *memory_limit = NULL, *streams = NULL, *needs;
	struct pen_options options = PEN_OPTIONS_INIT;
	PyObject *saving = NULL, *where = NULL;
	struct pen_stream *after = NULL;
	int transfer = PEN_AUTO, gather = 0, rc;
	struct pen_torch_save *save;
	struct pack pack = { 0 };
	struct device *device;
	struct pen_error err;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O!O!O|iOO!p", names,
					 PyUnicode_FSConverter, &path, device_type, &device,
					 &PyList_Type, &items, &keeps, &transfer, &memory_limit,
					 &PyList_Type, &streams, &gather))
		return NULL;
	if (read_options(&options, transfer, memory_limit, NULL, PEN_CACHE_AUTO) &&
	    read_items(items, &pack))
		after = read_streams(streams, &options);
	needs = PyTuple_Pack(2, (PyObject *)device, items);
	if (after && needs) {
		/* All storages are one group. */
		options.groups = gather ? 1 : 0;
		Py_BEGIN_ALLOW_THREADS
		rc = pen_torch_pack_start(PyBytes_AsString(path), device->handle, pack.items,
					  pack.count, &options, &save, &err);
		Py_END_ALLOW_THREADS
		saving = rc ? raise_error(&err) : saving_new(&torch_saving, save, keeps, needs);
	}
	where = saving ? places(&pack) : NULL;
	Py_XDECREF(needs);
	PyMem_Free(after);
	pack_free(&pack);
	Py_DECREF(path);
	if (!where) {
		Py_XDECREF(saving);
		return NULL;
	}
	return Py_BuildValue("(NN)", saving, where);
}

/* ------------------------------------------------------------------------------ TorchItems -- */

struct torch_items {
	PyObject_HEAD
	struct pen_object *object;
	struct pen_torch **files;	/* in the order of offsets; NULL: one that is not read */
	struct pen_error *errors;	/* why not */
	size_t count;
};

static PyTypeObject *torch_items_type;

/* Open each for itself: what cannot be read is torch's to read, or to refuse. */
static int open_items(struct torch_items *self, const char *path, const uint64_t *spans,
		      struct pen_error *err)
{
	int rc = pen_object_open(path, PEN_READ, 0, &self->object, err);

	for (size_t i = 0; !rc && i < self->count; i++)
		pen_torch_open_item(self->object, spans[2 * i], spans[2 * i + 1], &self->files[i],
				    &self->errors[i]);
	return rc;
}

static uint64_t *read_spans(PyObject *list, size_t count)
{
	uint64_t *spans = PyMem_Calloc(2 * count + 1, sizeof(spans[0]));
	uint64_t end = 0;

	if (!spans)
		PyErr_NoMemory();
	for (size_t i = 0; spans && i < count; i++) {
		unsigned long long offset, length;

		if (PyArg_ParseTuple(PyList_GetItem(list, (Py_ssize_t)i), "KK", &offset, &length) &&
		    offset < end)
			PyErr_SetString(PyExc_ValueError, "items are not in the order of offsets");
		if (PyErr_Occurred()) {
			PyMem_Free(spans);
			return NULL;
		}
		spans[2 * i] = offset;
		spans[2 * i + 1] = length;
		end = offset + length;
	}
	return spans;
}

static PyObject *torch_items_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "path", "spans", NULL };
	struct torch_items *self = NULL;
	uint64_t *spans = NULL;
	PyObject *path, *list;
	struct pen_error err;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O!", names, PyUnicode_FSConverter, &path,
					 &PyList_Type, &list))
		return NULL;
	spans = read_spans(list, (size_t)PyList_Size(list));
	self = spans ? new_object(type, sizeof(*self)) : NULL;
	if (self) {
		self->count = (size_t)PyList_Size(list);
		self->files = PyMem_Calloc(self->count + 1, sizeof(self->files[0]));
		self->errors = PyMem_Calloc(self->count + 1, sizeof(self->errors[0]));
	}
	if (self && self->files && self->errors) {
		Py_BEGIN_ALLOW_THREADS
		rc = open_items(self, PyBytes_AsString(path), spans, &err);
		Py_END_ALLOW_THREADS
		if (rc) {
			Py_CLEAR(self);
			raise_error(&err);
		}
	} else if (self) {
		Py_CLEAR(self);
		PyErr_NoMemory();
	}
	PyMem_Free(spans);
	Py_DECREF(path);
	return (PyObject *)self;
}

static void torch_items_dealloc(PyObject *object)
{
	struct torch_items *self = (struct torch_items *)object;

	Py_BEGIN_ALLOW_THREADS
	for (size_t i = 0; self->files && i < self->count; i++)
		pen_torch_close(self->files[i]);
	pen_object_close(self->object);
	Py_END_ALLOW_THREADS
	PyMem_Free(self->files);
	PyMem_Free(self->errors);
	free_object(object);
}

static PyObject *numbers(const uint64_t *from, uint32_t count)
{
	PyObject *tuple = PyTuple_New(count);

	for (uint32_t i = 0; tuple && i < count; i++) {
		PyObject *number = PyLong_FromUnsignedLongLong(from[i]);

		if (!number || PyTuple_SetItem(tuple, i, number) < 0)
			Py_CLEAR(tuple);
	}
	return tuple;
}

static PyObject *torch_items_tensor(PyObject *object, PyObject *argument)
{
	struct torch_items *self = (struct torch_items *)object;
	size_t index = PyLong_AsSize_t(argument), count;
	const struct pen_torch_tensor *tensors;
	PyObject *shape, *stride, *pickle;
	struct pen_error err;
	int rc;

	if (PyErr_Occurred())
		return NULL;
	if (index >= self->count) {
		PyErr_SetString(PyExc_IndexError, "there is no such item");
		return NULL;
	}
	if (!self->files[index])
		return raise_error(&self->errors[index]);
	Py_BEGIN_ALLOW_THREADS
	rc = pen_torch_tensors(self->files[index], &tensors, &count, &err);
	Py_END_ALLOW_THREADS
	if (rc)
		return raise_error(&err);
	if (count != 1)
		Py_RETURN_NONE;
	/* What torch would unpickle, for whoever wants to know more. */
	pickle = torch_record_bytes(self->files[index],
				    pen_torch_find(self->files[index], "data.pkl"));
	if (!pickle)
		return NULL;
	shape = numbers(tensors->shape, tensors->rank);
	stride = numbers(tensors->stride, tensors->rank);
	if (!shape || !stride) {
		Py_DECREF(pickle);
		Py_XDECREF(shape);
		Py_XDECREF(stride);
		return NULL;
	}
	return Py_BuildValue("(sNNKN)", tensors->type, shape, stride,
			     (unsigned long long)tensors->offset, pickle);
}

/* ----------------------------------------------------------------------------------- loads -- */

/* Extents from [(offset, length, address, device)]; NULL with an exception. */
static struct pen_extent *read_wanted(const struct torch_items *self, PyObject *list, size_t count)
{
	struct pen_extent *extents = PyMem_Calloc(count + 1, sizeof(extents[0]));

	if (!extents)
		PyErr_NoMemory();
	for (size_t i = 0; extents && i < count; i++) {
		unsigned long long offset, length, address;
		struct device *device;

		if (!PyArg_ParseTuple(PyList_GetItem(list, (Py_ssize_t)i), "KKKO!", &offset,
				      &length, &address, device_type, &device)) {
			PyMem_Free(extents);
			return NULL;
		}
		extents[i] = (struct pen_extent){
			.object = self->object, .offset = offset, .length = length,
			.memory = (void *)(uintptr_t)address, .device = device->handle,
		};
	}
	return extents;
}

/* The items that could be opened, as a table; NULL with an exception. */
static struct pen_torch **opened(const struct torch_items *self, size_t *count)
{
	struct pen_torch **files = PyMem_Calloc(self->count + 1, sizeof(files[0]));

	*count = 0;
	for (size_t i = 0; files && i < self->count; i++)
		if (self->files[i])
			files[(*count)++] = self->files[i];
	return files ? files : (struct pen_torch **)PyErr_NoMemory();
}

static PyObject *torch_items_load(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "device", "wanted", "keeps", "verify", "transfer", "memory_limit",
				 "streams", "cache", NULL };
	PyObject *wanted, *keeps, *memory_limit = NULL, *streams = NULL, *all = NULL;
	struct torch_items *items = (struct torch_items *)self;
	int verify = true, transfer = PEN_AUTO, cache = PEN_CACHE_AUTO, rc;
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent *extents = NULL;
	struct pen_stream *after = NULL;
	struct pen_torch **files = NULL;
	size_t count, file_count = 0;
	struct job *job = NULL;
	struct device *device;
	struct pen_error err;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O|piOO!i", names, device_type, &device,
					 &PyList_Type, &wanted, &keeps, &verify, &transfer,
					 &memory_limit, &PyList_Type, &streams, &cache) ||
	    !read_options(&options, transfer, memory_limit, NULL, cache))
		return NULL;
	count = (size_t)PyList_Size(wanted);
	extents = read_wanted(items, wanted, count);
	after = extents ? read_streams(streams, &options) : NULL;
	files = after ? opened(items, &file_count) : NULL;
	all = files ? PyTuple_Pack(3, self, keeps, wanted) : NULL;
	job = all ? job_new(device, all) : NULL;
	Py_XDECREF(all);
	if (job) {
		Py_BEGIN_ALLOW_THREADS
		rc = torch_start_load(files, verify ? file_count : 0, device, extents, count,
				      &options, job, &err);
		Py_END_ALLOW_THREADS
		if (rc) {
			raise_error(&err);
			Py_CLEAR(job);
		}
	}
	PyMem_Free(files);
	PyMem_Free(after);
	PyMem_Free(extents);
	return (PyObject *)job;
}

static PyMethodDef torch_items_methods[] = {
	{ "tensor", torch_items_tensor, METH_O,
	  "tensor(index) -> (type, shape, stride, offset in the file, data.pkl); None: it is not "
	  "one tensor. What cannot be read raises." },
	{ "load", (PyCFunction)(void (*)(void))torch_items_load, METH_VARARGS | METH_KEYWORDS,
	  "load(device, wanted, keeps, verify=True, transfer=0, memory_limit=None, streams=[], "
	  "cache=0) -> Job; wanted: [(offset, length, address, device)]." },
	{ NULL },
};

static PyType_Slot torch_items_slots[] = {
	{ Py_tp_doc, "TorchItems(path, spans): items of a file, each (offset, length), in order." },
	{ Py_tp_new, torch_items_new },
	{ Py_tp_dealloc, torch_items_dealloc },
	{ Py_tp_methods, torch_items_methods },
	{ 0, NULL },
};

bool torch_pack_init(PyObject *module)
{
	return type_add(module, &torch_items_type, MODULE "TorchItems", sizeof(struct torch_items),
			torch_items_slots, 0);
}
