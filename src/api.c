/* SPDX-License-Identifier: MIT */
/* What of the public API belongs to no module below. */
#include "mem/pool.h"
#include "penstock.h"
#include "sys/cufile.h"
#include "sys/memory.h"

const char *pen_version(void)
{
	return PEN_VERSION;
}

int pen_version_number(void)
{
	return PEN_VERSION_NUMBER;
}

uint64_t pen_memory_available(void)
{
	return memory_available("");
}

void pen_trim(void)
{
	piece_trim(NULL);
	cufile_trim();
}
