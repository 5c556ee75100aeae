/* SPDX-License-Identifier: MIT */
/*
 * Saves under way as Python objects. A Saving can be waited for, watched and cancelled, whatever is
 * saved: each kind brings a table of functions and a handle. The rules are those of jobs
 * (_penstock.c): waiting happens without the GIL and notices Ctrl-C, one thread waits at a time,
 * and what nobody waits for when the interpreter ends is stopped.
 */
#include <errno.h>
#include "binding.h"

struct saving {
	PyObject_HEAD
	const struct saving_kind *kind;
	void *handle;		/* NULL: waited for */
	PyObject *keeps;	/* whatever owns the memory; NULL: that may go */
	PyObject *needs;	/* whatever else must live until the end */
	bool waiting;		/* a thread uses the handle without the GIL */
	struct saving *next;	/* in the list of those under way, guarded by the GIL */
};

static PyTypeObject *saving_type;
static struct saving *under_way;

static void forget(struct saving *saving)
{
	struct saving **link = &under_way;

	while (*link && *link != saving)
		link = &(*link)->next;
	if (*link)
		*link = saving->next;
}

PyObject *saving_new(const struct saving_kind *kind, void *handle, PyObject *keeps,
		     PyObject *needs)
{
	struct saving *saving = new_object(saving_type, sizeof(*saving));

	if (!saving) {
		kind->cancel(handle);
		Py_BEGIN_ALLOW_THREADS
		kind->wait(handle, NULL, NULL);
		Py_END_ALLOW_THREADS
		return NULL;
	}
	saving->kind = kind;
	saving->handle = handle;
	saving->keeps = Py_NewRef(keeps);
	saving->needs = Py_NewRef(needs);
	saving->next = under_way;
	under_way = saving;
	return (PyObject *)saving;
}

/* Wait for the end and let go of the handle; the caller sees to it that the object outlives it. */
static int finish(struct saving *saving, struct pen_report *report, struct pen_error *err)
{
	void *handle = saving->handle;
	int rc;

	saving->handle = NULL;
	saving->waiting = true;
	forget(saving);
	Py_BEGIN_ALLOW_THREADS
	rc = saving->kind->wait(handle, report, err);
	Py_END_ALLOW_THREADS
	saving->waiting = false;
	return rc;
}

static void stop(struct saving *saving)
{
	saving->kind->cancel(saving->handle);
	finish(saving, NULL, NULL);
}

static void saving_dealloc(PyObject *self)
{
	struct saving *saving = (struct saving *)self;

	if (saving->handle)
		stop(saving);
	Py_XDECREF(saving->keeps);
	Py_XDECREF(saving->needs);
	free_object(self);
}

static bool begin_waiting(struct saving *saving)
{
	if (!saving->handle)
		PyErr_SetString(PyExc_ValueError, "the save was waited for already");
	else if (saving->waiting)
		PyErr_SetString(PyExc_RuntimeError, "another thread waits for this save");
	else
		saving->waiting = true;
	return !PyErr_Occurred();
}

/* A slice of waiting, by one of the kind's functions: 1 when that is over, well or badly, 0 not
 * yet, -1 with an exception, and stopped. */
static int wait_a_little(struct saving *saving, int (*wait_for)(void *, double), double seconds)
{
	PyObject *type, *value, *trace;
	int rc;

	Py_BEGIN_ALLOW_THREADS
	rc = wait_for(saving->handle, seconds < SIGNALS_EVERY ? seconds : SIGNALS_EVERY);
	Py_END_ALLOW_THREADS
	if (!PyErr_CheckSignals())
		return rc != -ETIMEDOUT;
	PyErr_Fetch(&type, &value, &trace);
	stop(saving);
	PyErr_Restore(type, value, trace);
	return -1;
}

/* The end of a save whose bytes have moved, or never will: its report, or its error. */
static PyObject *end(struct saving *saving)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_error err;
	int rc = finish(saving, &report, &err);

	Py_CLEAR(saving->keeps);
	Py_CLEAR(saving->needs);
	return rc ? raise_error(&err) : report_dict(&report);
}

static PyObject *saving_wait(PyObject *self, PyObject *unused)
{
	struct saving *saving = (struct saving *)self;
	int rc;

	(void)unused;
	if (!begin_waiting(saving))
		return NULL;
	do
		rc = wait_a_little(saving, saving->kind->wait_for, SIGNALS_EVERY);
	while (!rc);
	return rc < 0 ? NULL : end(saving);
}

static PyObject *saving_wait_gathered(PyObject *self, PyObject *unused)
{
	struct saving *saving = (struct saving *)self;
	int (*gathered)(void *, double) = saving->kind->gathered ? saving->kind->gathered
								 : saving->kind->wait_for;
	int rc;

	(void)unused;
	if (!begin_waiting(saving))
		return NULL;
	do
		rc = wait_a_little(saving, gathered, SIGNALS_EVERY);
	while (!rc);
	if (rc < 0)
		return NULL;
	if (gathered(saving->handle, 0))
		return end(saving);
	saving->waiting = false;
	/* Nobody reads that memory any more. */
	Py_CLEAR(saving->keeps);
	Py_RETURN_NONE;
}

static PyObject *saving_wait_for(PyObject *self, PyObject *argument)
{
	double seconds = PyFloat_AsDouble(argument);
	struct saving *saving = (struct saving *)self;
	int rc;

	if (PyErr_Occurred() || !begin_waiting(saving))
		return NULL;
	rc = wait_a_little(saving, saving->kind->wait_for, seconds);
	if (rc < 0)
		return NULL;
	saving->waiting = false;
	return PyBool_FromLong(rc);
}

static PyObject *saving_progress(PyObject *self, PyObject *unused)
{
	struct saving *saving = (struct saving *)self;
	struct pen_progress progress;

	(void)unused;
	if (!saving->handle) {
		PyErr_SetString(PyExc_ValueError, "the save was waited for already");
		return NULL;
	}
	saving->kind->poll(saving->handle, &progress);
	return Py_BuildValue("(KKd)", (unsigned long long)progress.bytes,
			     (unsigned long long)progress.total, progress.seconds);
}

static PyObject *saving_cancel(PyObject *self, PyObject *unused)
{
	struct saving *saving = (struct saving *)self;

	(void)unused;
	if (saving->handle)
		saving->kind->cancel(saving->handle);
	Py_RETURN_NONE;
}

static PyMethodDef saving_methods[] = {
	{ "wait", saving_wait, METH_NOARGS,
	  "Wait until all is durable and in place; the report as a dict." },
	{ "wait_gathered", saving_wait_gathered, METH_NOARGS,
	  "Wait until the memory may change again; then it is let go of." },
	{ "wait_for", saving_wait_for, METH_O,
	  "Wait until all is written, at most so long; is it?" },
	{ "progress", saving_progress, METH_NOARGS, "(bytes, total, seconds) so far." },
	{ "cancel", saving_cancel, METH_NOARGS, "Ask the save to stop; wait() then raises." },
	{ NULL },
};

static PyType_Slot saving_slots[] = {
	{ Py_tp_doc, "A save under way. One that is let go of is stopped, and changes nothing." },
	{ Py_tp_dealloc, saving_dealloc },
	{ Py_tp_methods, saving_methods },
	{ 0, NULL },
};

bool saving_init(PyObject *module)
{
	return type_add(module, &saving_type, MODULE "Saving", sizeof(struct saving), saving_slots,
			Py_TPFLAGS_DISALLOW_INSTANTIATION);
}

void saving_stop_all(void)
{
	struct saving *saving = under_way;

	while (saving) {
		if (!saving->handle || saving->waiting) {
			saving = saving->next;
			continue;
		}
		/* Others may let go of it meanwhile. */
		Py_INCREF((PyObject *)saving);
		stop(saving);
		Py_DECREF((PyObject *)saving);
		saving = under_way;
	}
}

/* ----------------------------------------------------------------------------- safetensors -- */

static int safetensors_wait_for(void *handle, double seconds)
{
	return pen_save_wait_for(handle, seconds);
}

static int safetensors_wait(void *handle, struct pen_report *report, struct pen_error *err)
{
	return pen_save_wait(handle, report, err);
}

static void safetensors_poll(void *handle, struct pen_progress *progress)
{
	pen_save_poll(handle, progress);
}

static void safetensors_cancel(void *handle)
{
	pen_save_cancel(handle);
}

static const struct saving_kind safetensors = {
	.poll = safetensors_poll,
	.cancel = safetensors_cancel,
	.wait_for = safetensors_wait_for,
	.wait = safetensors_wait,
};

/* What pen_save_start() is given, out of Python's objects, which keep their texts. */
struct request {
	struct pen_save_tensor *tensors;
	uint64_t *numbers;		/* of all shapes */
	size_t tensor_count;
	struct pen_metadata *metadata;
	struct pen_options transfer;
	struct pen_save_options options;
};

static void request_free(struct request *request)
{
	PyMem_Free(request->tensors);
	PyMem_Free(request->numbers);
	PyMem_Free(request->metadata);
}

static bool read_text(PyObject *object, const char **text, size_t *length)
{
	Py_ssize_t size;

	*text = PyUnicode_AsUTF8AndSize(object, &size);
	*length = *text ? (size_t)size : 0;
	return *text;
}

/* (name, dtype, shape, address, device) */
static bool read_tensor(PyObject *item, struct pen_save_tensor *tensor, uint64_t **numbers)
{
	PyObject *name, *shape, *address;
	struct device *device;

	if (!PyArg_ParseTuple(item, "UiO!OO!", &name, &tensor->dtype, &PyTuple_Type, &shape,
			      &address, device_type, &device) ||
	    !read_text(name, &tensor->name, &tensor->name_length))
		return false;
	tensor->memory = PyLong_AsVoidPtr(address);
	tensor->device = device->handle;
	tensor->rank = (uint32_t)PyTuple_Size(shape);
	tensor->shape = *numbers;
	for (uint32_t i = 0; i < tensor->rank && !PyErr_Occurred(); i++)
		*(*numbers)++ = PyLong_AsUnsignedLongLong(PyTuple_GetItem(shape, i));
	return !PyErr_Occurred();
}

static bool read_tensors(struct request *request, PyObject *list)
{
	Py_ssize_t count = PyList_Size(list);
	size_t room = 1;
	uint64_t *numbers;

	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *item = PyList_GetItem(list, i);
		PyObject *shape = PyTuple_Check(item) && PyTuple_Size(item) > 2
					  ? PyTuple_GetItem(item, 2) : NULL;

		room += shape && PyTuple_Check(shape) ? (size_t)PyTuple_Size(shape) : 0;
	}
	request->tensor_count = (size_t)count;
	request->tensors = PyMem_Calloc((size_t)count + 1, sizeof(request->tensors[0]));
	request->numbers = numbers = PyMem_Calloc(room, sizeof(numbers[0]));
	if (!request->tensors || !numbers)
		return PyErr_NoMemory();
	for (Py_ssize_t i = 0; i < count; i++)
		if (!read_tensor(PyList_GetItem(list, i), &request->tensors[i], &numbers))
			return false;
	return true;
}

/* [(key, value)], or None for none at all */
static bool read_metadata(struct request *request, PyObject *list)
{
	Py_ssize_t count = list == Py_None ? 0 : PyList_Size(list);
	PyObject *key, *value;

	if (list == Py_None || count < 0)
		return !PyErr_Occurred();
	request->metadata = PyMem_Calloc((size_t)count + 1, sizeof(request->metadata[0]));
	if (!request->metadata)
		return PyErr_NoMemory();
	for (Py_ssize_t i = 0; i < count; i++) {
		struct pen_metadata *pair = &request->metadata[i];

		if (!PyArg_ParseTuple(PyList_GetItem(list, i), "UU", &key, &value) ||
		    !read_text(key, &pair->key, &pair->key_length) ||
		    !read_text(value, &pair->value, &pair->value_length))
			return false;
	}
	request->options.metadata = request->metadata;
	request->options.metadata_count = (size_t)count;
	return true;
}

PyObject *save_safetensors(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "path", "tensors", "metadata", "align", "shard_size", "streams",
				 "keeps", "transfer", "memory_limit", "inject", "coded", NULL };
	struct request request = {
		.transfer = PEN_OPTIONS_INIT,
		.options = PEN_SAVE_OPTIONS_INIT,
	};
	PyObject *path, *tensors, *metadata, *streams, *keeps, *made = NULL;
	unsigned long long align, shard_size, memory_limit;
	struct pen_stream *after = NULL;
	struct pen_save *save;
	struct pen_error err;
	int rc;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O!OKKO!OiK|zp", names,
					 PyUnicode_FSConverter, &path, &PyList_Type, &tensors,
					 &metadata, &align, &shard_size, &PyList_Type, &streams,
					 &keeps, &request.transfer.transfer, &memory_limit,
					 &request.transfer.inject, &request.options.coded))
		return NULL;
	request.transfer.memory_limit = memory_limit;
	request.options.align = align;
	request.options.shard_size = shard_size;
	request.options.transfer = &request.transfer;
	if (read_tensors(&request, tensors) && read_metadata(&request, metadata))
		after = read_streams(streams, &request.transfer);
	if (after) {
		Py_BEGIN_ALLOW_THREADS
		rc = pen_save_start(PyBytes_AsString(path), request.tensors, request.tensor_count,
				    &request.options, &save, &err);
		Py_END_ALLOW_THREADS
		made = rc ? raise_error(&err) : saving_new(&safetensors, save, keeps, tensors);
	}
	PyMem_Free(after);
	request_free(&request);
	Py_DECREF(path);
	return made;
}

/* (header, [(number of a tensor, its bytes), ...] as they lie) */
static PyObject *layout_tuple(const struct pen_layout *layout)
{
	const struct pen_layout_file *file = &layout->files[0];
	PyObject *places = PyList_New((Py_ssize_t)file->tensor_count);

	for (size_t i = 0; places && i < file->tensor_count; i++) {
		size_t number = file->tensors[i];
		PyObject *place = Py_BuildValue("(nK)", (Py_ssize_t)number,
						(unsigned long long)layout->places[number].bytes);

		if (!place || PyList_SetItem(places, (Py_ssize_t)i, place) < 0)
			Py_CLEAR(places);
	}
	return places ? Py_BuildValue("(y#N)", (const char *)file->header,
				      (Py_ssize_t)file->header_size, places) : NULL;
}

PyObject *layout_safetensors(PyObject *module, PyObject *args)
{
	struct request request = { .options = PEN_SAVE_OPTIONS_INIT };
	PyObject *tensors, *metadata, *made = NULL;
	struct pen_layout *layout;
	struct pen_error err;

	(void)module;
	if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &tensors, &metadata))
		return NULL;
	if (read_tensors(&request, tensors) && read_metadata(&request, metadata)) {
		if (pen_layout_make(request.tensors, request.tensor_count, &request.options,
				    &layout, &err)) {
			raise_error(&err);
		} else {
			made = layout_tuple(layout);
			pen_layout_free(layout);
		}
	}
	request_free(&request);
	return made;
}
