/* SPDX-License-Identifier: MIT */
/* Forms as Python sees them: by dtypes, as indices into DTYPES, of which select() takes one. */
#include "binding.h"

PyObject *converts(PyObject *module, PyObject *arguments)
{
	int from, to;

	(void)module;
	if (!PyArg_ParseTuple(arguments, "ii", &from, &to))
		return NULL;
	return PyBool_FromLong(pen_form_find(from, to) >= 0);
}
