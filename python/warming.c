/* SPDX-License-Identifier: MIT */
/*
 * The page cache as Python sees it: what people's words for a policy mean, what the engine's
 * background thread is at, and how much room there is. That thread never enters Python.
 */
#include "binding.h"

PyObject *cache_policy(PyObject *module, PyObject *word)
{
	PyObject *bytes = word == Py_None ? NULL : PyUnicode_AsUTF8String(word);
	struct pen_error err;
	int cache, rc;

	(void)module;
	if (word != Py_None && !bytes)
		return NULL;
	rc = pen_cache_parse(bytes ? PyBytes_AsString(bytes) : NULL, &cache, &err);
	Py_XDECREF(bytes);
	return rc ? raise_error(&err) : PyLong_FromLong(cache);
}

PyObject *warming(PyObject *module, PyObject *unused)
{
	struct pen_warming now = PEN_WARMING_INIT;

	(void)module;
	(void)unused;
	pen_warming_poll(&now);
	return Py_BuildValue("(KKKs)", (unsigned long long)now.left,
			     (unsigned long long)now.brought, (unsigned long long)now.given_up,
			     now.reason);
}

PyObject *warming_wait(PyObject *module, PyObject *argument)
{
	double seconds = PyFloat_AsDouble(argument);
	int rc;

	(void)module;
	if (PyErr_Occurred())
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = pen_warming_wait(seconds);
	Py_END_ALLOW_THREADS
	return PyBool_FromLong(!rc);
}

PyObject *warming_stop(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	pen_warming_stop();
	Py_RETURN_NONE;
}

PyObject *available(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;
	return PyLong_FromUnsignedLongLong(pen_memory_available());
}
