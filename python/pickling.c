/* SPDX-License-Identifier: MIT */
/*
 * A pickler asks about each thing whether it is one that lies elsewhere: for a tensor 19 times, and
 * once it is a storage. Training waits while a state is pickled, so the answer no, which depends on
 * the type alone, is given here.
 */
#include "binding.h"

/* `own` has the types that were answered with None, and the function that answers. */
static PyObject *ask(PyObject *own, PyObject *thing)
{
	PyObject *others = PyTuple_GetItem(own, 0), *type = (PyObject *)Py_TYPE(thing), *answer;
	int known = PySet_Contains(others, type);

	if (known)
		return known < 0 ? NULL : Py_NewRef(Py_None);
	answer = PyObject_CallFunctionObjArgs(PyTuple_GetItem(own, 1), thing, NULL);
	if (answer == Py_None && PySet_Add(others, type))
		Py_CLEAR(answer);
	return answer;
}

PyObject *ask_by_type(PyObject *module, PyObject *function)
{
	static PyMethodDef method = { "ask", ask, METH_O, "None, or what the function answers." };
	PyObject *others = PySet_New(NULL);
	PyObject *own = others ? PyTuple_Pack(2, others, function) : NULL;
	PyObject *made = own ? PyCFunction_New(&method, own) : NULL;

	(void)module;
	Py_XDECREF(others);
	Py_XDECREF(own);
	return made;
}
