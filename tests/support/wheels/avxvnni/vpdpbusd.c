/* Emulates AVX-VNNI's vpdpbusd and vpdpwssd (VEX.66.0F38.W0 50 and 52) on x86-64 processors without AVX-VNNI.
   LD_PRELOAD loads it.

   These instructions raise SIGILL on these processors. The handler computes the result in the registers of the signal's
   frame, and continues after the instruction. All other illegal instructions end the process as usual. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

enum { STATE_BV = 512, YMM_HIGH = 576, SSE = 2, AVX = 4 }; /* XSAVE's standard format */

static const int REGISTERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* Returns the bytes of half a register: the low half is in the legacy area. */
static uint8_t *half(ucontext_t *context, int number, int high) {
    uint8_t *area = (uint8_t *)context->uc_mcontext.fpregs;
    return high ? area + YMM_HIGH + 16 * number : (uint8_t *)&context->uc_mcontext.fpregs->_xmm[number];
}

/* Computes the address of an operand in memory, and moves `at` past it. `end` is where a displacement would begin. */
static const uint8_t *operand(ucontext_t *context, const uint8_t **at, int inverted) {
    greg_t *registers = context->uc_mcontext.gregs;
    int modrm = *(*at)++, mod = modrm >> 6, base = modrm & 7;
    int64_t address = 0, displacement = 0;
    int is_relative = mod == 0 && base == 5;
    if (base == 4) {
        int sib = *(*at)++, index = (sib >> 3 & 7) | (inverted & 2 ? 0 : 8);
        base = sib & 7;
        if (index != 4)
            address += registers[REGISTERS[index]] << (sib >> 6);
        if (mod == 0 && base == 5)
            mod = 2, base = -1;
    }
    if (base >= 0 && !is_relative)
        address += registers[REGISTERS[base | (inverted & 1 ? 0 : 8)]];
    if (mod == 1)
        displacement = (int8_t)*(*at)++;
    if (mod == 2 || is_relative) {
        int32_t wide;
        memcpy(&wide, *at, 4);
        displacement = wide, *at += 4;
    }
    if (is_relative)
        address = (int64_t)*at;
    return (const uint8_t *)(address + displacement);
}

static void on_illegal_instruction(int number, siginfo_t *info, void *pointer) {
    ucontext_t *context = pointer;
    const uint8_t *at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    (void)info;
    if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || (at[2] & 0x83) != 1 || (at[3] != 0x50 && at[3] != 0x52)) {
        signal(number, SIG_DFL); /* the instruction runs again, and ends the process */
        return;
    }
    int has_words = at[3] == 0x52, inverted = at[1] >> 5, halves = at[2] & 4 ? 2 : 1;
    int target = (at[4] >> 3 & 7) | (inverted & 4 ? 0 : 8), left = ~at[2] >> 3 & 15;
    int right = at[4] >> 6 == 3 ? (at[4] & 7) | (inverted & 1 ? 0 : 8) : -1;
    uint8_t *area = (uint8_t *)context->uc_mcontext.fpregs;
    uint64_t present;
    memcpy(&present, area + STATE_BV, 8);
    if (!(present & AVX))
        memset(area + YMM_HIGH, 0, 256); /* the processor leaves out what is zero */
    if (!(present & SSE))
        memset(context->uc_mcontext.fpregs->_xmm, 0, 256);
    present |= SSE | AVX;
    memcpy(area + STATE_BV, &present, 8);
    at += 4;
    const uint8_t *memory = NULL;
    if (right < 0)
        memory = operand(context, &at, inverted);
    else
        at++;
    for (int high = 0; high < 2; high++) {
        uint8_t *sums = half(context, target, high), *bytes = half(context, left, high);
        int16_t words[8], others[8];
        if (high >= halves) {
            memset(sums, 0, 16); /* VEX.128 clears the upper half */
            continue;
        }
        const int8_t *factors = (const int8_t *)(memory ? memory + 16 * high : half(context, right, high));
        memcpy(words, bytes, 16);
        memcpy(others, factors, 16);
        for (int lane = 0; lane < 4; lane++) {
            uint32_t sum;
            memcpy(&sum, sums + 4 * lane, 4);
            for (int word = 2 * lane; has_words && word < 2 * lane + 2; word++)
                sum += (uint32_t)(words[word] * others[word]);
            for (int byte = 4 * lane; !has_words && byte < 4 * lane + 4; byte++)
                sum += (uint32_t)(bytes[byte] * factors[byte]);
            memcpy(sums + 4 * lane, &sum, 4);
        }
    }
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)at;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, NULL);
}
