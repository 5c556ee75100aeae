/* SPDX-License-Identifier: MIT */
/*
 * A folder of checkpoints as a Python object. What changes the folder happens one call at a time;
 * looking at it goes on meanwhile, in any thread. close() closes when the last call is done.
 */
#include <string.h>
#include "binding.h"

struct checkpoints {
	PyObject_HEAD
	struct pen_checkpoints *handle;	/* NULL: closed */
	unsigned int uses;		/* calls under way without the GIL */
	bool writing;			/* one of them changes something */
	bool closing;
	uint32_t rank;
	uint64_t step;			/* of the last begin() */
	uint32_t world_size;
};

static PyTypeObject *checkpoints_type;

static void close_now(struct checkpoints *self)
{
	struct pen_checkpoints *handle = self->handle;

	self->handle = NULL;
	Py_BEGIN_ALLOW_THREADS
	pen_checkpoints_close(handle);
	Py_END_ALLOW_THREADS
}

/* Begin to use the handle; false with an exception. */
static bool enter(struct checkpoints *self, bool writes)
{
	if (!self->handle || self->closing)
		PyErr_SetString(PyExc_ValueError, "the folder of checkpoints is closed");
	else if (writes && self->writing)
		PyErr_SetString(PyExc_RuntimeError,
				"another thread writes to this folder of checkpoints");
	if (PyErr_Occurred())
		return false;
	self->uses++;
	self->writing |= writes;
	return true;
}

static void leave(struct checkpoints *self, bool writes)
{
	self->uses--;
	if (writes)
		self->writing = false;
	if (self->closing && !self->uses && self->handle)
		close_now(self);
}

/* `call` without the GIL, and what it says as an exception. */
#define RUN(self, writes, rc, call)                       \
	do {                                              \
		Py_BEGIN_ALLOW_THREADS                    \
		rc = call;                                \
		Py_END_ALLOW_THREADS                      \
		leave(self, writes);                      \
	} while (0)

/* ------------------------------------------------------------------------------- looking -- */

static PyObject *steps(PyObject *object, PyObject *unused)
{
	struct checkpoints *self = (struct checkpoints *)object;
	struct pen_checkpoint_list *list = NULL;
	PyObject *made;
	struct pen_error err;
	int rc;

	(void)unused;
	if (!enter(self, false))
		return NULL;
	RUN(self, false, rc, pen_checkpoints_list(self->handle, &list, &err));
	if (rc)
		return raise_error(&err);
	made = PyList_New(0);
	for (size_t i = 0; made && i < list->count; i++) {
		PyObject *number;

		if (list->steps[i].state != PEN_CHECKPOINT_WHOLE)
			continue;
		number = PyLong_FromUnsignedLongLong(list->steps[i].step);
		if (!number || PyList_Append(made, number))
			Py_CLEAR(made);
		Py_XDECREF(number);
	}
	pen_checkpoint_list_free(list);
	return made;
}

static bool read_step(PyObject *number, uint64_t *step)
{
	*step = PyLong_AsUnsignedLongLong(number);
	return !PyErr_Occurred();
}

static PyObject *path_of(PyObject *object, PyObject *number)
{
	struct checkpoints *self = (struct checkpoints *)object;
	const char *path;
	PyObject *folder, *made = NULL;
	uint64_t step;

	if (!read_step(number, &step) || !enter(self, false))
		return NULL;
	path = pen_checkpoints_path(self->handle);
	folder = PyUnicode_DecodeFSDefault(path);
	if (folder)
		made = PyUnicode_FromFormat("%U/step-%08llu", folder, (unsigned long long)step);
	Py_XDECREF(folder);
	leave(self, false);
	return made;
}

static PyObject *file_dict(const struct pen_checkpoint_file *file)
{
	return Py_BuildValue("{sssKsKss}", "name", file->name, "bytes",
			     (unsigned long long)file->bytes, "tensors",
			     (unsigned long long)file->tensors, "digest", file->digest);
}

/* What json.NAME() makes of an argument. */
static PyObject *json_call(const char *name, PyObject *argument, PyObject *options)
{
	PyObject *module = PyImport_ImportModule("json");
	PyObject *function = module ? PyObject_GetAttrString(module, name) : NULL;
	PyObject *arguments = function && argument ? PyTuple_Pack(1, argument) : NULL;
	PyObject *made = arguments ? PyObject_Call(function, arguments, options) : NULL;

	Py_XDECREF(arguments);
	Py_XDECREF(function);
	Py_XDECREF(module);
	return made;
}

static PyObject *manifest_dict(const struct pen_checkpoint *checkpoint)
{
	PyObject *files = PyList_New(0), *text, *user;

	for (size_t i = 0; files && i < checkpoint->file_count; i++) {
		PyObject *file = file_dict(&checkpoint->files[i]);

		if (!file || PyList_Append(files, file))
			Py_CLEAR(files);
		Py_XDECREF(file);
	}
	if (!files)
		return NULL;
	text = PyUnicode_FromStringAndSize(checkpoint->user, (Py_ssize_t)checkpoint->user_length);
	user = text ? json_call("loads", text, NULL) : NULL;
	Py_XDECREF(text);
	if (!user) {
		Py_DECREF(files);
		return NULL;
	}
	return Py_BuildValue("{sKsssIsKsNsN}", "step", (unsigned long long)checkpoint->step,
			     "time", checkpoint->time, "world_size", checkpoint->world_size,
			     "bytes", (unsigned long long)checkpoint->bytes, "files", files,
			     "user", user);
}

static PyObject *show(PyObject *object, PyObject *number)
{
	struct checkpoints *self = (struct checkpoints *)object;
	struct pen_checkpoint *checkpoint = NULL;
	struct pen_error err;
	PyObject *made;
	uint64_t step;
	int rc;

	if (!read_step(number, &step) || !enter(self, false))
		return NULL;
	RUN(self, false, rc, pen_checkpoints_show(self->handle, step, &checkpoint, &err));
	made = rc ? raise_error(&err) : manifest_dict(checkpoint);
	pen_checkpoint_free(checkpoint);
	return made;
}

static PyObject *check(PyObject *object, PyObject *args)
{
	struct checkpoints *self = (struct checkpoints *)object;
	unsigned long long step;
	struct pen_error err;
	unsigned int rank;
	int rc;

	if (!PyArg_ParseTuple(args, "KI", &step, &rank) || !enter(self, false))
		return NULL;
	RUN(self, false, rc, pen_checkpoints_check(self->handle, step, rank, &err));
	if (rc)
		return raise_error(&err);
	Py_RETURN_NONE;
}

static PyObject *verify(PyObject *object, PyObject *number)
{
	struct pen_checkpoint_checked checked = PEN_CHECKPOINT_CHECKED_INIT;
	struct checkpoints *self = (struct checkpoints *)object;
	struct pen_error err;
	uint64_t step;
	int rc;

	if (!read_step(number, &step) || !enter(self, false))
		return NULL;
	RUN(self, false, rc, pen_checkpoints_verify(self->handle, step, NULL, &checked, &err));
	if (rc)
		return raise_error(&err);
	return Py_BuildValue("{sKsKsKsKsK}", "step", (unsigned long long)step, "files",
			     (unsigned long long)checked.files, "bytes",
			     (unsigned long long)checked.bytes, "verified_bytes",
			     (unsigned long long)checked.verified, "unverified_bytes",
			     (unsigned long long)checked.unverified);
}

/* -------------------------------------------------------------------------------- writing -- */

static PyObject *begin(PyObject *object, PyObject *args)
{
	struct checkpoints *self = (struct checkpoints *)object;
	unsigned int rank, world_size;
	unsigned long long step;
	const char *path = NULL;
	struct pen_error err;
	int overwrite, rc;

	if (!PyArg_ParseTuple(args, "KIIp", &step, &rank, &world_size, &overwrite))
		return NULL;
	if (rank != self->rank)
		return PyErr_Format(PyExc_ValueError, "this folder was opened as rank %u, not %u",
				    (unsigned int)self->rank, rank);
	if (!enter(self, true))
		return NULL;
	RUN(self, true, rc, pen_checkpoints_begin(self->handle, step, world_size,
						  overwrite ? PEN_CHECKPOINT_OVERWRITE : 0, &path,
						  &err));
	if (rc)
		return raise_error(&err);
	self->step = step;
	self->world_size = world_size;
	return PyUnicode_DecodeFSDefault(path);
}

/* Is it the step that was begun? */
static bool is_begun(struct checkpoints *self, unsigned long long step)
{
	if (step == self->step)
		return true;
	PyErr_Format(PyExc_ValueError, "step %llu was begun last, not %llu",
		     (unsigned long long)self->step, step);
	return false;
}

static PyObject *describe(PyObject *object, PyObject *number)
{
	struct checkpoints *self = (struct checkpoints *)object;
	struct pen_checkpoint_file file;
	struct pen_error err;
	uint64_t step;
	int rc;

	if (!read_step(number, &step) || !is_begun(self, step) || !enter(self, true))
		return NULL;
	RUN(self, true, rc, pen_checkpoints_describe(self->handle, &file, &err));
	return rc ? raise_error(&err) : file_dict(&file);
}

static bool read_text(PyObject *dict, const char *key, char *to, size_t size)
{
	PyObject *value = PyDict_GetItemString(dict, key);
	const char *text = value ? PyUnicode_AsUTF8AndSize(value, NULL) : NULL;

	if (!value)
		PyErr_Format(PyExc_KeyError, "a file needs %s", key);
	if (!text)
		return false;
	if (strlen(text) >= size)
		PyErr_Format(PyExc_ValueError, "%s of a file is too long", key);
	else
		strcpy(to, text);
	return !PyErr_Occurred();
}

static bool read_number(PyObject *dict, const char *key, uint64_t *to)
{
	PyObject *value = PyDict_GetItemString(dict, key);

	if (!value)
		PyErr_Format(PyExc_KeyError, "a file needs %s", key);
	else
		*to = PyLong_AsUnsignedLongLong(value);
	return !PyErr_Occurred();
}

static struct pen_checkpoint_file *read_files(PyObject *list, Py_ssize_t count)
{
	struct pen_checkpoint_file *files = PyMem_Calloc((size_t)count + 1, sizeof(files[0]));

	if (!files)
		return (struct pen_checkpoint_file *)PyErr_NoMemory();
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *dict = PyList_GetItem(list, i);

		if (!PyDict_Check(dict))
			PyErr_SetString(PyExc_TypeError, "files must be dicts");
		if (PyErr_Occurred() ||
		    !read_text(dict, "name", files[i].name, sizeof(files[i].name)) ||
		    !read_number(dict, "bytes", &files[i].bytes) ||
		    !read_number(dict, "tensors", &files[i].tensors) ||
		    !read_text(dict, "digest", files[i].digest, sizeof(files[i].digest))) {
			PyMem_Free(files);
			return NULL;
		}
	}
	return files;
}

static PyObject *commit(PyObject *object, PyObject *args)
{
	struct checkpoints *self = (struct checkpoints *)object;
	PyObject *list, *user, *options, *text;
	struct pen_checkpoint_file *files = NULL;
	const char *json = NULL;
	unsigned long long step;
	struct pen_error err;
	int rc = 0;

	if (!PyArg_ParseTuple(args, "KO!O!", &step, &PyList_Type, &list, &PyDict_Type, &user) ||
	    !is_begun(self, step))
		return NULL;
	/* JSON has no numbers for these: they are refused here, by name. */
	options = Py_BuildValue("{sOsO}", "allow_nan", Py_False, "ensure_ascii", Py_False);
	text = options ? json_call("dumps", user, options) : NULL;
	Py_XDECREF(options);
	if (text)
		json = PyUnicode_AsUTF8AndSize(text, NULL);
	if (json)
		files = read_files(list, PyList_Size(list));
	if (files && enter(self, true)) {
		size_t count = (size_t)PyList_Size(list);

		RUN(self, true, rc, pen_checkpoints_commit(self->handle, files, count, json, &err));
		if (rc)
			raise_error(&err);
	}
	PyMem_Free(files);
	Py_XDECREF(text);
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

/* The save that is under way is over, in one way or another. */
static PyObject *end_step(PyObject *object, PyObject *number,
			  int (*end)(struct pen_checkpoints *, struct pen_error *))
{
	struct checkpoints *self = (struct checkpoints *)object;
	struct pen_error err;
	uint64_t step;
	int rc;

	if (!read_step(number, &step) || !is_begun(self, step) || !enter(self, true))
		return NULL;
	RUN(self, true, rc, end(self->handle, &err));
	if (rc)
		return raise_error(&err);
	Py_RETURN_NONE;
}

static PyObject *abandon(PyObject *object, PyObject *number)
{
	return end_step(object, number, pen_checkpoints_abandon);
}

static PyObject *leave_step(PyObject *object, PyObject *number)
{
	return end_step(object, number, pen_checkpoints_leave);
}

static PyObject *gc(PyObject *object, PyObject *number)
{
	struct checkpoints *self = (struct checkpoints *)object;
	unsigned long keep = PyLong_AsUnsignedLong(number);
	struct pen_checkpoint_removal *removal = NULL;
	struct pen_error err;
	PyObject *made;
	int rc;

	if (PyErr_Occurred() || !enter(self, true))
		return NULL;
	RUN(self, true, rc, pen_checkpoints_gc(self->handle,
					       keep > UINT32_MAX ? UINT32_MAX : (uint32_t)keep, 0,
					       &removal, &err));
	if (rc)
		return raise_error(&err);
	made = PyList_New(0);
	for (size_t i = 0; made && i < removal->step_count; i++) {
		PyObject *step = PyLong_FromUnsignedLongLong(removal->steps[i]);

		if (!step || PyList_Append(made, step))
			Py_CLEAR(made);
		Py_XDECREF(step);
	}
	pen_checkpoint_removal_free(removal);
	return made;
}

static PyObject *sweep(PyObject *object, PyObject *unused)
{
	struct checkpoints *self = (struct checkpoints *)object;
	struct pen_checkpoint_removal *removal = NULL;
	struct pen_error err;
	PyObject *made;
	int rc;

	(void)unused;
	if (!enter(self, true))
		return NULL;
	RUN(self, true, rc, pen_checkpoints_sweep(self->handle, 0, &removal, &err));
	if (rc)
		return raise_error(&err);
	made = PyList_New(0);
	for (size_t i = 0; made && i < removal->removed_count; i++) {
		PyObject *name = PyUnicode_DecodeFSDefault(removal->removed[i]);

		if (!name || PyList_Append(made, name))
			Py_CLEAR(made);
		Py_XDECREF(name);
	}
	pen_checkpoint_removal_free(removal);
	return made;
}

/* ----------------------------------------------------------------------------- the object -- */

static PyObject *close_folder(PyObject *object, PyObject *unused)
{
	struct checkpoints *self = (struct checkpoints *)object;

	(void)unused;
	self->closing = true;
	if (self->handle && !self->uses)
		close_now(self);
	Py_RETURN_NONE;
}

static PyObject *warning_of(PyObject *object, void *unused)
{
	struct checkpoints *self = (struct checkpoints *)object;

	(void)unused;
	return PyUnicode_FromString(self->handle ? pen_checkpoints_warning(self->handle) : "");
}

static void checkpoints_dealloc(PyObject *object)
{
	struct checkpoints *self = (struct checkpoints *)object;

	if (self->handle)
		close_now(self);
	free_object(object);
}

static PyMethodDef methods[] = {
	{ "steps", steps, METH_NOARGS, "Steps that are whole, ascending." },
	{ "path", path_of, METH_O, "path(step) -> the path of its folder, be it there or not." },
	{ "show", show, METH_O, "show(step) -> its manifest, as a dict." },
	{ "verify", verify, METH_O, "verify(step) -> dict; raises if it is not as it was saved." },
	{ "check", check, METH_VARARGS,
	  "check(step, rank): raises if its file is not the one that the manifest means." },
	{ "begin", begin, METH_VARARGS,
	  "begin(step, rank, world_size, overwrite) -> the path of the file to write." },
	{ "describe", describe, METH_O,
	  "describe(step) -> what this rank has written, for commit(), as a dict." },
	{ "commit", commit, METH_VARARGS,
	  "commit(step, files, user): by rank 0, with what all ranks have described." },
	{ "abandon", abandon, METH_O, "abandon(step): remove what was written since begin()." },
	{ "leave", leave_step, METH_O,
	  "leave(step): by the other ranks; it is rank 0's affair from now on." },
	{ "gc", gc, METH_O, "gc(keep) -> the steps that were removed." },
	{ "sweep", sweep, METH_NOARGS, "What a crash left, and is removed now." },
	{ "close", close_folder, METH_NOARGS, "Close; a step under way is abandoned." },
	{ NULL },
};

static PyGetSetDef attributes[] = {
	{ "warning", warning_of, NULL, "What is odd but no error, or \"\".", NULL },
	{ NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_doc, "A folder of checkpoints." },
	{ Py_tp_dealloc, checkpoints_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_getset, attributes },
	{ 0, NULL },
};

bool checkpoints_init(PyObject *module)
{
	return type_add(module, &checkpoints_type, MODULE "Checkpoints", sizeof(struct checkpoints),
			slots, Py_TPFLAGS_DISALLOW_INSTANTIATION);
}

PyObject *checkpoints_open(PyObject *module, PyObject *args)
{
	struct checkpoints *self;
	struct pen_checkpoints *handle = NULL;
	struct pen_error err;
	unsigned int rank;
	PyObject *path;
	int write, rc;

	(void)module;
	if (!PyArg_ParseTuple(args, "O&pI", PyUnicode_FSConverter, &path, &write, &rank))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_checkpoints_open(PyBytes_AsString(path), write ? PEN_WRITE : PEN_READ, rank,
				  &handle, &err);
	Py_END_ALLOW_THREADS
	Py_DECREF(path);
	if (rc)
		return raise_error(&err);
	self = new_object(checkpoints_type, sizeof(*self));
	if (!self) {
		pen_checkpoints_close(handle);
		return NULL;
	}
	self->handle = handle;
	self->rank = rank;
	return (PyObject *)self;
}
