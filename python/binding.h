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
 * the right order whatever the order in which Python lets go. Memory itself is counted without
 * Python, as a block: what looks into it by DLPack may let go of it in any thread, with or without
 * the GIL, and even when the interpreter has ended.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>
#include "penstock.h"

struct device {
	PyObject_HEAD
	struct pen_device *handle;
};

/* Memory that Penstock allocated, or a file that it mapped; freed by the last to let go. */
struct block {
	atomic_uint_fast64_t uses;	/* holders, and BLOCK_READER for each reader: mapping.c */
	struct pen_device *device;	/* opened for the block alone */
	unsigned char *address;
	uint64_t size;
	bool mapped;
	pid_t readers_of;		/* the process whose threads the readers are */
};

#define BLOCK_READER ((uint64_t)1 << 48)

struct memory {
	PyObject_HEAD
	struct block *block;
};

/*
 * What is left to do when the bytes of a job have moved, where pen_job_wait() is not all: to
 * compare digests. `end` waits for the job, too, frees the struct, and runs without the GIL.
 */
struct ending {
	int (*end)(struct ending *self, struct pen_job *job, struct pen_report *report,
		   struct pen_error *err);
};

struct job {
	PyObject_HEAD
	struct pen_job *handle;	/* NULL: waited for */
	struct ending *ending;	/* NULL: the job's own end is all */
	struct device *device;
	PyObject *keeps;	/* whatever must live until the end */
	void *allocated;	/* filled in by pen_job_wait() */
	uint64_t allocate;
	bool waiting;		/* a thread uses the handle without the GIL */
	struct job *next;	/* in the list of jobs under way, guarded by the GIL */
};

extern PyTypeObject *device_type, *memory_type, *array_type, *view_type;

/* Raise penstock.Error with all that `err` knows. Always returns NULL. */
PyObject *raise_error(const struct pen_error *err);

/* How often a waiting call looks for signals, in seconds. */
#define SIGNALS_EVERY 0.1

/* A new object of `size` bytes with everything after the head zero; and how such a one is freed. */
void *new_object(PyTypeObject *type, size_t size);
void free_object(PyObject *self);

PyObject *report_dict(const struct pen_report *report);

/* Options that every call takes: transfer, memory_limit, stream, cache; false with an exception. */
bool read_options(struct pen_options *options, int transfer, PyObject *memory_limit,
		  PyObject *stream, int cache);

/* A table of `count` structs of `size` bytes, at least one, for PyMem_Free(); NULL with an
 * exception. */
void *new_table(Py_ssize_t count, size_t size);

/* The streams that a job starts after, from [(device, handle)] or NULL for none, into the options;
 * for PyMem_Free() when the job has started. NULL with an exception. */
struct pen_stream *read_streams(PyObject *list, struct pen_options *options);

/* The bytes of a small record, verified; NULL with an exception. */
PyObject *torch_record_bytes(const struct pen_torch *file, const struct pen_torch_record *record);

/* A job that is about to start, and keeps what must live until its end: set `handle` then, or let
 * go of it. */
struct job *job_new(struct device *device, PyObject *keeps);

/* A new array: `shape` numbers of kind `dtype` from `offset` on. Checks that they fit. */
PyObject *array_new(struct memory *memory, uint64_t offset, int dtype, PyObject *shape);

/* A type of the module, kept for good; false with an exception. `name` has the module before it,
 * MODULE where users do not see it. */
#define MODULE "penstock._penstock."
bool type_add(PyObject *module, PyTypeObject **type, const char *name, size_t size,
	      PyType_Slot *slots, unsigned int flags);

/* One more holder of a block, and one less: neither needs the GIL. The last may have to wait for
 * a GPU. */
struct block *block_hold(struct block *block);
void block_release(struct block *block);

/* The same for readers, which keep the block from being freed but do not count as holders. */
void block_hold_reader(struct block *block);
void block_release_reader(struct block *block);
bool block_is_held(struct block *block);
bool block_has_readers(struct block *block);
/* In a forked child: the readers are its parent's. With the GIL. */
void block_forget_readers(struct block *block);

/* A Memory that owns what is at the address; where there is none, it is freed. */
PyObject *memory_wrap(struct pen_device *device, void *address, uint64_t size, bool mapped);

/* mapping.c: methods of Memory, and a function of the module. */
PyObject *memory_read_ahead(PyObject *self, PyObject *args);
PyObject *memory_reading(PyObject *self, PyObject *unused);
PyObject *map_file(PyObject *module, PyObject *args);

/* forms.c: a function of the module. */
PyObject *converts(PyObject *module, PyObject *arguments);

/* warming.c: functions of the module. */
PyObject *cache_policy(PyObject *module, PyObject *word);
PyObject *warming(PyObject *module, PyObject *unused);
PyObject *warming_wait(PyObject *module, PyObject *argument);
PyObject *warming_stop(PyObject *module, PyObject *unused);
PyObject *available(PyObject *module, PyObject *unused);

/*
 * saving.c: a kind of save, by what is done with its handle. `wait` commits and releases, but for a
 * forked child; only what waits may take long, and is called without the GIL.
 */
struct saving_kind {
	void (*poll)(void *handle, struct pen_progress *progress);
	void (*cancel)(void *handle);
	int (*wait_for)(void *handle, double seconds);
	int (*wait)(void *handle, struct pen_report *report, struct pen_error *err);
	int (*gathered)(void *handle, double seconds);	/* NULL: when all is written */
};

/* A Saving that owns the handle; where there is none, the save is stopped. It keeps the owners of
 * the memory until that is gathered, and what the handle itself needs until the end. */
PyObject *saving_new(const struct saving_kind *kind, void *handle, PyObject *keeps,
		     PyObject *needs);
void saving_stop_all(void);
PyObject *save_safetensors(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *layout_safetensors(PyObject *module, PyObject *args);
bool saving_init(PyObject *module);

bool device_is_host(const struct pen_device *device);
int device_index(const struct pen_device *device);

/* torch_file.c: adds TorchFile to the module, and a function of it. */
bool torch_file_init(PyObject *module);
PyObject *torch_save(PyObject *module, PyObject *args, PyObject *kwargs);
extern const struct saving_kind torch_saving;
/* Start to read, and have the job's end compare what the files know; with none, nothing. Without
 * the GIL: the job is nobody else's yet. */
int torch_start_load(struct pen_torch *const *files, size_t file_count, struct device *device,
		     const struct pen_extent *extents, size_t count,
		     struct pen_options *options, struct job *job, struct pen_error *err);

/* torch_pack.c: adds TorchItems to the module, and a function of it. */
bool torch_pack_init(PyObject *module);
PyObject *torch_pack(PyObject *module, PyObject *args, PyObject *kwargs);

/* pickling.c: a function of the module. */
PyObject *ask_by_type(PyObject *module, PyObject *function);

/* checkpoints.c: adds Checkpoints to the module, and a function of it. */
bool checkpoints_init(PyObject *module);
PyObject *checkpoints_open(PyObject *module, PyObject *args);

/* Adds Array, View and the functions of arrays.c to the module. */
bool arrays_init(PyObject *module);

#endif
