/* SPDX-License-Identifier: MIT */
#ifndef PYTHON_BINDING_H
#define PYTHON_BINDING_H
/*
 * What the files of the extension module share. The module is a thin skin over penstock.h: handles
 * become objects, errors become penstock.Error, and every call that waits lets go of the GIL. The
 * pleasant things are written in Python, in penstock/.
 *
 * Ownership: an object holds a reference to each object that its C handle needs (a job to its
 * model or objects, its device and its memory; an array to its memory), so handles are closed in
 * the right order whatever the order in which Python lets go.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include "penstock.h"

struct device {
	PyObject_HEAD
	struct pen_device *handle;
};

/* Memory that Penstock allocated; freed with the last array that looks into it. */
struct memory {
	PyObject_HEAD
	struct device *device;
	unsigned char *address;
	uint64_t size;
};

extern PyTypeObject *device_type, *memory_type, *array_type, *view_type;

/* Raise penstock.Error with all that `err` knows. Always returns NULL. */
PyObject *raise_error(const struct pen_error *err);

/* A new array: `shape` numbers of kind `dtype` from `offset` on. Checks that they fit. */
PyObject *array_new(struct memory *memory, uint64_t offset, int dtype, PyObject *shape);

/* A type from its spec, kept for good; NULL with an exception. */
PyTypeObject *type_add(PyObject *module, const char *name, PyType_Spec *spec);

int device_is_host(const struct device *device);
int device_index(const struct device *device);

/* Adds Array, View and the functions of arrays.c to the module. */
int arrays_init(PyObject *module);

#endif
