/* SPDX-License-Identifier: MIT */
/*
 * Arrays that leave, and memory that comes in.
 *
 * An Array is a typed window into memory that Penstock allocated. It speaks DLPack (both the old
 * and the versioned capsule), __cuda_array_interface__ and, on the host, the buffer protocol; so
 * any framework can look at it without a copy. Bytes are complete before anybody gets an Array, so
 * the consumer's stream has nothing to wait for. A capsule holds the block of memory, not the
 * Array, and a shape of its own: its deleter never enters Python.
 *
 * A View is the other way round: the address and size of something that a caller handed in, by
 * DLPack or the buffer protocol, held until the View goes.
 */
#include <stdlib.h>
#include <string.h>
#include "binding.h"

/* DLPack's own declarations, as far as they are used here; the layout is its ABI. */
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3 };
enum { DL_INT, DL_UINT, DL_FLOAT, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };
#define DL_READ_ONLY 1u
/* Codes after DL_BOOL are of DLPack 1.1. */
#define DL_MINOR(code) ((code) > DL_BOOL ? 1u : 0u)

struct dl_tensor {
	void *data;
	int32_t device_type, device_id;
	int32_t ndim;
	uint8_t code, bits;
	uint16_t lanes;
	int64_t *shape, *strides;
	uint64_t byte_offset;
};

struct dl_managed {
	struct dl_tensor tensor;
	void *context;
	void (*deleter)(struct dl_managed *self);
};

struct dl_versioned {
	uint32_t major, minor;
	void *context;
	void (*deleter)(struct dl_versioned *self);
	uint64_t flags;
	struct dl_tensor tensor;
};

struct array {
	PyObject_HEAD
	struct memory *memory;
	unsigned char *data;
	int dtype;
	uint64_t bytes;
	int ndim;
	int64_t *shape, *strides, *byte_strides;	/* one block of 3 * ndim */
};

struct view {
	PyObject_HEAD
	Py_buffer buffer;
	bool has_buffer;
	struct dl_managed *managed;
	struct dl_versioned *versioned;
	struct dl_tensor tensor;	/* what DLPack said */
};

PyTypeObject *array_type, *view_type;

/* How other worlds call our kinds of numbers. `format` is the buffer protocol's and `typestr` that
 * of __cuda_array_interface__; NULL where they have no word for it. */
static const struct kind {
	uint8_t code, bits;
	const char *format, *typestr;
} kinds[PEN_DTYPES] = {
	[PEN_BOOL] = { DL_BOOL, 8, "?", "|b1" },
	[PEN_F4] = { 17, 4, NULL, NULL },
	[PEN_F6_E2M3] = { 15, 6, NULL, NULL },
	[PEN_F6_E3M2] = { 16, 6, NULL, NULL },
	[PEN_U8] = { DL_UINT, 8, "B", "|u1" },
	[PEN_I8] = { DL_INT, 8, "b", "|i1" },
	[PEN_F8_E5M2] = { 12, 8, NULL, NULL },
	[PEN_F8_E4M3] = { 10, 8, NULL, NULL },
	[PEN_F8_E8M0] = { 14, 8, NULL, NULL },
	[PEN_F8_E4M3FNUZ] = { 11, 8, NULL, NULL },
	[PEN_F8_E5M2FNUZ] = { 13, 8, NULL, NULL },
	[PEN_I16] = { DL_INT, 16, "h", "<i2" },
	[PEN_U16] = { DL_UINT, 16, "H", "<u2" },
	[PEN_F16] = { DL_FLOAT, 16, "e", "<f2" },
	[PEN_BF16] = { DL_BFLOAT, 16, NULL, NULL },
	[PEN_I32] = { DL_INT, 32, "i", "<i4" },
	[PEN_U32] = { DL_UINT, 32, "I", "<u4" },
	[PEN_F32] = { DL_FLOAT, 32, "f", "<f4" },
	[PEN_C64] = { DL_COMPLEX, 64, "Zf", "<c8" },
	[PEN_F64] = { DL_FLOAT, 64, "d", "<f8" },
	[PEN_I64] = { DL_INT, 64, "q", "<i8" },
	[PEN_U64] = { DL_UINT, 64, "Q", "<u8" },
};

/* ---------------------------------------------------------------------------------- Array -- */

/* Strides and size from the shape; false with an exception. Strides are as if no dimension were 0;
 * where one is, they mean nothing, and those that do not fit are 0. */
static bool lay_out(struct array *array)
{
	int64_t stride = 1, bits = pen_dtype_bits(array->dtype);
	bool empty = false, fits = true;

	for (int i = array->ndim - 1; i >= 0; i--) {
		int64_t size = array->shape[i];

		empty |= !size;
		array->strides[i] = stride;
		array->byte_strides[i] = bits / 8;
		if (__builtin_mul_overflow(stride, size ? size : 1, &stride) ||
		    __builtin_mul_overflow(stride, pen_dtype_bits(array->dtype), &bits)) {
			fits = false;
			stride = bits = 0;
		}
	}
	if (!fits && !empty) {
		PyErr_SetString(PyExc_OverflowError, "the shape is too large");
		return false;
	}
	array->bytes = empty ? 0 : (uint64_t)(bits / 8 + (bits % 8 != 0));
	return true;
}

/* Read `shape`, and lay it out; false with an exception. */
static bool read_shape(struct array *array, PyObject *shape)
{
	Py_ssize_t ndim = PySequence_Size(shape);

	if (ndim < 0)
		return false;
	array->ndim = (int)ndim;
	array->shape = PyMem_Malloc((size_t)(ndim ? ndim : 1) * 3 * sizeof(array->shape[0]));
	if (!array->shape) {
		PyErr_NoMemory();
		return false;
	}
	array->strides = array->shape + ndim;
	array->byte_strides = array->strides + ndim;
	for (Py_ssize_t i = 0; i < ndim; i++) {
		PyObject *item = PySequence_GetItem(shape, i);

		array->shape[i] = item ? PyLong_AsLongLong(item) : -1;
		Py_XDECREF(item);
		if (PyErr_Occurred())
			return false;
		if (array->shape[i] < 0) {
			PyErr_SetString(PyExc_ValueError, "a dimension is negative");
			return false;
		}
	}
	return lay_out(array);
}

PyObject *array_new(struct memory *memory, uint64_t offset, int dtype, PyObject *shape)
{
	struct array *array;

	if (dtype < 0 || dtype >= PEN_DTYPES) {
		PyErr_Format(PyExc_ValueError, "%d is no dtype", dtype);
		return NULL;
	}
	array = PyObject_New(struct array, array_type);
	if (!array)
		return NULL;
	array->memory = (struct memory *)Py_NewRef((PyObject *)memory);
	array->dtype = dtype;
	array->shape = NULL;
	if (!read_shape(array, shape)) {
		Py_DECREF((PyObject *)array);
		return NULL;
	}
	if (offset > memory->block->size || array->bytes > memory->block->size - offset) {
		PyErr_SetString(PyExc_ValueError, "the array ends beyond its memory");
		Py_DECREF((PyObject *)array);
		return NULL;
	}
	array->data = memory->block->address + offset;
	return (PyObject *)array;
}

static void array_dealloc(PyObject *self)
{
	struct array *array = (struct array *)self;
	PyTypeObject *type = Py_TYPE(self);

	PyMem_Free(array->shape);
	Py_DECREF((PyObject *)array->memory);
	PyObject_Free(self);
	Py_DECREF((PyObject *)type);
}

static PyObject *array_shape(PyObject *self, void *unused)
{
	struct array *array = (struct array *)self;
	PyObject *shape = PyTuple_New(array->ndim);

	(void)unused;
	for (int i = 0; shape && i < array->ndim; i++) {
		PyObject *number = PyLong_FromLongLong(array->shape[i]);

		if (!number)
			Py_CLEAR(shape);
		else
			PyTuple_SetItem(shape, i, number);
	}
	return shape;
}

static PyObject *array_dtype(PyObject *self, void *unused)
{
	(void)unused;
	return PyUnicode_FromString(pen_dtype_name(((struct array *)self)->dtype));
}

static PyObject *array_nbytes(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLongLong(((struct array *)self)->bytes);
}

static PyObject *array_address(PyObject *self, void *unused)
{
	(void)unused;
	return PyLong_FromVoidPtr(((struct array *)self)->data);
}

static PyObject *array_device(PyObject *self, void *unused)
{
	(void)unused;
	return PyUnicode_FromString(
		pen_device_name(((struct array *)self)->memory->block->device));
}

static PyObject *array_repr(PyObject *self)
{
	struct array *array = (struct array *)self;
	PyObject *shape = array_shape(self, NULL), *text;

	if (!shape)
		return NULL;
	text = PyUnicode_FromFormat("<penstock.Array %s %R on %s>", pen_dtype_name(array->dtype),
				    shape, pen_device_name(array->memory->block->device));
	Py_DECREF(shape);
	return text;
}

static PyObject *array_interface(PyObject *self, void *unused)
{
	struct array *array = (struct array *)self;
	const char *typestr = kinds[array->dtype].typestr;
	PyObject *shape, *result;

	(void)unused;
	if (device_is_host(array->memory->block->device)) {
		PyErr_SetString(PyExc_AttributeError, "the array is in host memory");
		return NULL;
	}
	if (!typestr) {
		PyErr_Format(PyExc_AttributeError,
			     "__cuda_array_interface__ has no word for %s; use DLPack",
			     pen_dtype_name(array->dtype));
		return NULL;
	}
	shape = array_shape(self, NULL);
	if (!shape)
		return NULL;
	result = Py_BuildValue("{s:N,s:s,s:(NO),s:O,s:i,s:O}", "shape", shape, "typestr", typestr,
			       "data", PyLong_FromVoidPtr(array->data), Py_False, "strides",
			       Py_None, "version", 3, "stream", Py_None);
	return result;
}

static void fill_tensor(struct array *array, struct dl_tensor *tensor)
{
	const struct kind *kind = &kinds[array->dtype];
	bool host = device_is_host(array->memory->block->device);

	*tensor = (struct dl_tensor){
		.data = array->data,
		.device_type = host ? DL_CPU : DL_CUDA,
		.device_id = host ? 0 : device_index(array->memory->block->device),
		.ndim = array->ndim,
		.code = kind->code,
		.bits = kind->bits,
		.lanes = 1,
		.shape = array->shape,
		.strides = array->strides,
	};
}

/* What a capsule points to: one of the two, and room for shape and strides. */
struct old_tensor {
	struct dl_managed managed;
	int64_t numbers[];
};

struct versioned_tensor {
	struct dl_versioned managed;
	int64_t numbers[];
};

/* The consumer is through with it. It may be a thread that knows nothing of Python. */
static void old_delete(struct dl_managed *managed)
{
	block_release(managed->context);
	free(managed);
}

static void versioned_delete(struct dl_versioned *managed)
{
	block_release(managed->context);
	free(managed);
}

/* A capsule that nobody consumed. */
static void capsule_delete(PyObject *capsule)
{
	struct dl_managed *managed;

	if (!PyCapsule_IsValid(capsule, "dltensor"))
		return;
	managed = PyCapsule_GetPointer(capsule, "dltensor");
	managed->deleter(managed);
}

static void versioned_capsule_delete(PyObject *capsule)
{
	struct dl_versioned *managed;

	if (!PyCapsule_IsValid(capsule, "dltensor_versioned"))
		return;
	managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
	managed->deleter(managed);
}

/* The tensor of a capsule, with its own copy of shape and strides in `numbers`. */
static void fill_own_tensor(struct array *array, struct dl_tensor *tensor, int64_t *numbers)
{
	size_t room = (size_t)array->ndim * sizeof(numbers[0]);

	fill_tensor(array, tensor);
	tensor->shape = memcpy(numbers, array->shape, room);
	tensor->strides = memcpy(numbers + array->ndim, array->strides, room);
}

static PyObject *old_capsule(struct array *array)
{
	struct old_tensor *tensor =
		malloc(sizeof(*tensor) + 2 * (size_t)array->ndim * sizeof(tensor->numbers[0]));
	PyObject *capsule;

	if (!tensor)
		return PyErr_NoMemory();
	fill_own_tensor(array, &tensor->managed.tensor, tensor->numbers);
	tensor->managed.context = block_hold(array->memory->block);
	tensor->managed.deleter = old_delete;
	capsule = PyCapsule_New(&tensor->managed, "dltensor", capsule_delete);
	if (!capsule)
		old_delete(&tensor->managed);
	return capsule;
}

static PyObject *versioned_capsule(struct array *array)
{
	struct versioned_tensor *tensor =
		malloc(sizeof(*tensor) + 2 * (size_t)array->ndim * sizeof(tensor->numbers[0]));
	PyObject *capsule;

	if (!tensor)
		return PyErr_NoMemory();
	fill_own_tensor(array, &tensor->managed.tensor, tensor->numbers);
	tensor->managed.major = 1;
	tensor->managed.minor = DL_MINOR(tensor->managed.tensor.code);
	tensor->managed.flags = 0;
	tensor->managed.context = block_hold(array->memory->block);
	tensor->managed.deleter = versioned_delete;
	capsule = PyCapsule_New(&tensor->managed, "dltensor_versioned", versioned_capsule_delete);
	if (!capsule)
		versioned_delete(&tensor->managed);
	return capsule;
}

/* Two numbers from a sequence; false with an exception. */
static bool read_pair(PyObject *pair, int *first, int *second)
{
	PyObject *tuple = PySequence_Tuple(pair);
	bool read = tuple && PyArg_ParseTuple(tuple, "ii", first, second);

	Py_XDECREF(tuple);
	return read;
}

/* Is the device that the consumer asks for the one where the bytes are? */
static bool device_matches(struct array *array, PyObject *wanted)
{
	struct dl_tensor tensor;
	int type, id;

	if (!wanted || wanted == Py_None)
		return true;
	if (!read_pair(wanted, &type, &id))
		return false;
	fill_tensor(array, &tensor);
	if (type == tensor.device_type && id == tensor.device_id)
		return true;
	PyErr_SetString(PyExc_BufferError, "the array is on another device");
	return false;
}

static PyObject *array_dlpack(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "stream", "max_version", "dl_device", "copy", NULL };
	PyObject *stream = Py_None, *version = Py_None, *device = Py_None, *copy = Py_None;
	struct array *array = (struct array *)self;
	int major = 0, minor = 0;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO", names, &stream, &version, &device,
					 &copy))
		return NULL;
	if (version != Py_None && !read_pair(version, &major, &minor))
		return NULL;
	if (!device_matches(array, device))
		return NULL;
	if (copy == Py_True) {
		PyErr_SetString(PyExc_BufferError, "the array is given as it is, not as a copy");
		return NULL;
	}
	return major >= 1 ? versioned_capsule(array) : old_capsule(array);
}

static PyObject *array_dlpack_device(PyObject *self, PyObject *unused)
{
	struct dl_tensor tensor;

	(void)unused;
	fill_tensor((struct array *)self, &tensor);
	return Py_BuildValue("(ii)", (int)tensor.device_type, (int)tensor.device_id);
}

/* Do the elements also lie one after the other with the first dimension first? */
static bool contiguous_both_ways(const struct array *array)
{
	int long_ones = 0;

	for (int i = 0; i < array->ndim; i++)
		long_ones += array->shape[i] > 1;
	return long_ones <= 1 || !array->bytes;
}

/* As plain bytes where the buffer protocol has no word for the numbers, or nobody asks for them. */
static int array_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
	struct array *array = (struct array *)self;
	const char *format = kinds[array->dtype].format;
	bool plain = !format || !(flags & PyBUF_FORMAT) || !(flags & PyBUF_ND);

	if (!device_is_host(array->memory->block->device)) {
		PyErr_SetString(PyExc_BufferError,
				"the array is in GPU memory; the CPU cannot look at it");
		return -1;
	}
	if (!plain && (flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS &&
	    !contiguous_both_ways(array)) {
		PyErr_SetString(PyExc_BufferError, "the array is in the order of C, not Fortran");
		return -1;
	}
	if (PyBuffer_FillInfo(view, self, array->data, (Py_ssize_t)array->bytes, 0, flags))
		return -1;
	if (plain)
		return 0;
	view->format = (char *)format;
	view->itemsize = kinds[array->dtype].bits / 8;
	view->ndim = array->ndim;
	view->shape = (Py_ssize_t *)array->shape;
	if (view->strides)
		view->strides = (Py_ssize_t *)array->byte_strides;
	return 0;
}

static PyGetSetDef array_getset[] = {
	{ "shape", array_shape, NULL, "Numbers in each dimension.", NULL },
	{ "dtype", array_dtype, NULL, "The kind of numbers, by safetensors' name.", NULL },
	{ "nbytes", array_nbytes, NULL, "Size in bytes.", NULL },
	{ "address", array_address, NULL, "Where the first byte is.", NULL },
	{ "device", array_device, NULL, "host or cuda:N.", NULL },
	{ "__cuda_array_interface__", array_interface, NULL, "For CuPy, Numba and others.", NULL },
	{ NULL },
};

static PyMethodDef array_methods[] = {
	{ "__dlpack__", (PyCFunction)(void (*)(void))array_dlpack, METH_VARARGS | METH_KEYWORDS,
	  "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
	  "The array as a DLPack capsule; no copy is made." },
	{ "__dlpack_device__", array_dlpack_device, METH_NOARGS, "DLPack's (type, id)." },
	{ NULL },
};

static PyType_Slot array_slots[] = {
	{ Py_tp_doc, "Numbers in memory that Penstock allocated; for DLPack, "
		     "__cuda_array_interface__ and, on the host, the buffer protocol." },
	{ Py_tp_dealloc, array_dealloc },
	{ Py_tp_repr, array_repr },
	{ Py_tp_getset, array_getset },
	{ Py_tp_methods, array_methods },
	{ Py_bf_getbuffer, array_getbuffer },
	{ 0, NULL },
};

/* ----------------------------------------------------------------------------------- View -- */

static void view_dealloc(PyObject *self)
{
	struct view *view = (struct view *)self;
	PyTypeObject *type = Py_TYPE(self);

	if (view->has_buffer)
		PyBuffer_Release(&view->buffer);
	if (view->managed && view->managed->deleter)
		view->managed->deleter(view->managed);
	if (view->versioned && view->versioned->deleter)
		view->versioned->deleter(view->versioned);
	PyObject_Free(self);
	Py_DECREF((PyObject *)type);
}

static struct view *view_new(void)
{
	struct view *view = PyObject_New(struct view, view_type);

	if (view)
		memset((char *)view + sizeof(PyObject), 0, sizeof(*view) - sizeof(PyObject));
	return view;
}

/* Do the elements lie one after the other, the last dimension first? */
static bool contiguous(const struct dl_tensor *tensor)
{
	int64_t expected = 1;

	if (!tensor->strides)
		return true;
	for (int i = 0; i < tensor->ndim; i++)
		if (!tensor->shape[i])
			return true;
	for (int i = tensor->ndim - 1; i >= 0; i--) {
		if (tensor->shape[i] != 1 && tensor->strides[i] != expected)
			return false;
		expected *= tensor->shape[i];
	}
	return true;
}

/* (view, address, nbytes, device, read_only) */
static PyObject *describe(struct view *view, void *address, uint64_t bytes, const char *device,
			  int index, bool read_only)
{
	PyObject *name = index < 0 ? PyUnicode_FromString(device)
				   : PyUnicode_FromFormat("%s:%d", device, index);

	if (!name) {
		Py_DECREF((PyObject *)view);
		return NULL;
	}
	return Py_BuildValue("(NNKNO)", (PyObject *)view, PyLong_FromVoidPtr(address),
			     (unsigned long long)bytes, name, read_only ? Py_True : Py_False);
}

static PyObject *view_of_buffer(PyObject *module, PyObject *args)
{
	struct view *view;
	PyObject *object;
	int writable;

	(void)module;
	if (!PyArg_ParseTuple(args, "Op", &object, &writable))
		return NULL;
	view = view_new();
	if (!view)
		return NULL;
	if (PyObject_GetBuffer(object, &view->buffer,
			       PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0))) {
		Py_DECREF((PyObject *)view);
		return NULL;
	}
	view->has_buffer = true;
	return describe(view, view->buffer.buf, (uint64_t)view->buffer.len, "host", -1,
			view->buffer.readonly);
}

/* Take over what a capsule holds, as DLPack wants it done; false with an exception. */
static bool consume(struct view *view, PyObject *capsule, bool *read_only)
{
	*read_only = false;
	if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
		struct dl_versioned *versioned =
			PyCapsule_GetPointer(capsule, "dltensor_versioned");

		if (versioned->major != 1) {
			PyErr_Format(PyExc_BufferError, "DLPack %d is not known here",
				     (int)versioned->major);
			return false;
		}
		if (PyCapsule_SetName(capsule, "used_dltensor_versioned"))
			return false;
		view->versioned = versioned;
		view->tensor = versioned->tensor;
		*read_only = versioned->flags & DL_READ_ONLY;
		return true;
	}
	if (!PyCapsule_IsValid(capsule, "dltensor")) {
		PyErr_SetString(PyExc_TypeError, "this is no DLPack capsule");
		return false;
	}
	view->managed = PyCapsule_GetPointer(capsule, "dltensor");
	view->tensor = view->managed->tensor;
	return !PyCapsule_SetName(capsule, "used_dltensor");
}

/* Bytes of a contiguous tensor; the last byte may be filled in part. False with an exception. */
static bool tensor_bytes(const struct dl_tensor *tensor, uint64_t *bytes)
{
	uint64_t bits = (uint64_t)tensor->bits * tensor->lanes;
	bool empty = false, fits = true;

	for (int i = 0; i < tensor->ndim; i++) {
		empty |= !tensor->shape[i];
		fits &= tensor->shape[i] >= 0 &&
			!__builtin_mul_overflow(bits, (uint64_t)tensor->shape[i], &bits);
	}
	if (!fits && !empty)
		PyErr_SetString(PyExc_ValueError, "the array's shape is none that can be had");
	*bytes = empty ? 0 : bits / 8 + (bits % 8 != 0);
	return fits || empty;
}

static PyObject *view_of_dlpack(PyObject *module, PyObject *capsule)
{
	struct view *view = view_new();
	struct dl_tensor *tensor;
	uint64_t bytes;
	bool read_only;

	(void)module;
	if (!view)
		return NULL;
	if (!consume(view, capsule, &read_only)) {
		Py_DECREF((PyObject *)view);
		return NULL;
	}
	tensor = &view->tensor;
	if (!tensor_bytes(tensor, &bytes)) {
		Py_DECREF((PyObject *)view);
		return NULL;
	}
	if (!contiguous(tensor)) {
		PyErr_SetString(PyExc_ValueError,
				"the array is not contiguous; make it so first");
		Py_DECREF((PyObject *)view);
		return NULL;
	}
	switch (tensor->device_type) {
	case DL_CPU:
	case DL_CUDA_HOST:
		return describe(view, (char *)tensor->data + tensor->byte_offset, bytes, "host", -1,
				read_only);
	case DL_CUDA:
		return describe(view, (char *)tensor->data + tensor->byte_offset, bytes, "cuda",
				tensor->device_id, read_only);
	default:
		PyErr_Format(PyExc_ValueError,
			     "memory of DLPack's device type %d cannot be used; take host or CUDA "
			     "memory", (int)tensor->device_type);
		Py_DECREF((PyObject *)view);
		return NULL;
	}
}

static PyType_Slot view_slots[] = {
	{ Py_tp_doc, "Keeps memory that was handed in from going away." },
	{ Py_tp_dealloc, view_dealloc },
	{ 0, NULL },
};

static PyMethodDef functions[] = {
	{ "view_of_buffer", view_of_buffer, METH_VARARGS,
	  "view_of_buffer(object, writable) -> (view, address, nbytes, device, read_only)" },
	{ "view_of_dlpack", view_of_dlpack, METH_O,
	  "view_of_dlpack(capsule) -> (view, address, nbytes, device, read_only)" },
	{ NULL },
};

bool arrays_init(PyObject *module)
{
	return type_add(module, &array_type, "penstock.Array", sizeof(struct array), array_slots,
			Py_TPFLAGS_DISALLOW_INSTANTIATION) &&
	       type_add(module, &view_type, MODULE "View", sizeof(struct view), view_slots,
			Py_TPFLAGS_DISALLOW_INSTANTIATION) &&
	       !PyModule_AddFunctions(module, functions);
}
