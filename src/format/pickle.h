/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_PICKLE_H
#define FORMAT_PICKLE_H
/*
 * The tensors that a pickle of torch's describes. A pickle is a program for a small machine with a
 * stack; here it runs over descriptions: containers, texts and whole numbers become what they are,
 * a call of one of torch's functions that make a tensor becomes a tensor, and everything else a
 * thing of which only the parts are known. Nothing that it names is looked up, nothing is called.
 *
 * Whatever the bytes, memory stays below some hundred times their number and a fixed limit, and the
 * time is bounded: what is shared many times over is not walked for ever.
 */
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

#define PICKLE_MAX (256u << 20)		/* bytes of a pickle */

/* A kind of number as torch knows it. */
struct torch_dtype {
	const char *name;	/* "float32" */
	const char *storage;	/* its storage's class, "FloatStorage"; NULL: it has none */
	unsigned int bits;
	int dtype;		/* enum pen_dtype, or -1 */
};

struct pickle_tensor {
	const char *name;	/* with a NUL after its end */
	size_t name_length;
	const char *key;	/* of its storage */
	size_t key_length;
	const char *location;	/* the device that its storage was on; "" where none is said */
	const struct torch_dtype *dtype;
	uint64_t offset;	/* elements, from the storage's start */
	uint32_t rank;
	const uint64_t *shape, *stride;	/* elements */
	uint64_t at;		/* where in the pickle its description ends */
};

struct pickle {
	struct pickle_tensor *tensors;	/* in the order of the pickle */
	size_t count;
	uint64_t *numbers;	/* where shapes lie, and names and keys */
	char *texts;
};

/*
 * `name` and `start`, the place of the pickle in that file, are for messages. Release with
 * pickle_fini(), which takes one that failed, too.
 */
int pickle_init(struct pickle *pickle, const char *name, const void *bytes, size_t length,
		uint64_t start, struct pen_error *err);
void pickle_fini(struct pickle *pickle);

#endif
