/* SPDX-License-Identifier: MIT */
/*
 * Puts image.fatbin into the library. Its place comes out of a header that the build writes anew
 * whenever the image changes, since compilers do not tell of what an assembler includes.
 */
#include <image_place.h>
#include "kernels/image.h"

/* The driver wants it aligned to 8 bytes. */
__asm__(".pushsection .rodata\n"
	".balign 16\n"
	".globl kernels_image\n"
	".hidden kernels_image\n"
	".type kernels_image, %object\n"
	"kernels_image:\n"
	".incbin \"" KERNELS_IMAGE_PLACE "\"\n"
	".size kernels_image, . - kernels_image\n"
	".popsection\n");
