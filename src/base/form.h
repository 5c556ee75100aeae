/* SPDX-License-Identifier: MIT */
#ifndef BASE_FORM_H
#define BASE_FORM_H
/*
 * A form is how bytes of an object become bytes of memory: as they are, or number by number in
 * another dtype. This is the one table of forms; each has a function for cores and the name of the
 * kernel that does the same on a GPU.
 */
#include <stddef.h>
#include <stdint.h>

struct form {
	int from, to;			/* enum pen_dtype */
	unsigned int from_size, to_size;	/* bytes of a number in the object, in memory */
	const char *kernel;		/* in the image of kernels/ */
	/* Addresses are multiples of the sizes; the two do not overlap. */
	void (*apply)(void *to, const void *from, size_t numbers);
};

/* By its public number (enum pen_form); NULL for plain bytes and where there is none. */
const struct form *form_of(uint64_t number);

uint64_t form_number(const struct form *form);

/* Bytes that `length` bytes of the object are in memory. */
static inline uint64_t form_bytes(const struct form *form, uint64_t length)
{
	return form ? length / form->from_size * form->to_size : length;
}

#endif
