"""Logs of shells in other languages are explained as those of an English one."""

import pytest
from log_samples import STEPS

from paceline.explain.catalogue import load_catalogue
from paceline.explain.run_folder import explain

SHELLS = {  # what bash 5.2 printed under each locale for a script of seven lines that fail
    "en": """\
train.sh: line 1: torchrunx: command not found
train.sh: line 2: 4711 Killed                  sh -c 'kill -9 $$'
train.sh: line 3: 4711 Segmentation fault      (core dumped) sh -c 'kill -SEGV $$'
train.sh: line 4: 4711 Bus error               (core dumped) sh -c 'kill -BUS $$'
train.sh: line 5: 4711 Aborted                 (core dumped) sh -c 'kill -ABRT $$'
train.sh: line 6: ./denied.py: Permission denied
train.sh: line 7: echo: write error: No space left on device
""",
    "zh_CN": """\
train.sh: 行 1: torchrunx: 未找到命令
train.sh: 第 2 行：4711 已杀死               sh -c 'kill -9 $$'
train.sh: 第 3 行：4711 段错误               （核心已转储）sh -c 'kill -SEGV $$'
train.sh: 第 4 行：4711 总线错误            （核心已转储）sh -c 'kill -BUS $$'
train.sh: 第 5 行：4711 已放弃               （核心已转储）sh -c 'kill -ABRT $$'
train.sh: 行 6: ./denied.py: 权限不够
train.sh: 第 7 行：echo: 写入错误：设备上没有空间
""",
    "zh_TW": """\
train.sh: 列 1: torchrunx：指令找不到
train.sh: 第 2 列：4711 強制結束            sh -c 'kill -9 $$'
train.sh: 第 3 列：4711 程式記憶體區段錯誤   (核心已傾印)sh -c 'kill -SEGV $$'
train.sh: 第 4 列：4711 匯流排錯誤         (核心已傾印)sh -c 'kill -BUS $$'
train.sh: 第 5 列：4711 中止                  (核心已傾印)sh -c 'kill -ABRT $$'
train.sh: 列 6: ./denied.py: 拒絕不符權限的操作
train.sh: 第 7 列：echo: 寫入時發生錯誤：裝置上已無多餘空間
""",
    "de_DE": """\
train.sh: Zeile 1: torchrunx: Kommando nicht gefunden.
train.sh: Zeile 2: 4711 Getötet                sh -c 'kill -9 $$'
train.sh: Zeile 3: 4711 Speicherzugriffsfehler  (Speicherabzug geschrieben) sh -c 'kill -SEGV $$'
train.sh: Zeile 4: 4711 Bus-Zugriffsfehler      (Speicherabzug geschrieben) sh -c 'kill -BUS $$'
train.sh: Zeile 5: 4711 Abgebrochen             (Speicherabzug geschrieben) sh -c 'kill -ABRT $$'
train.sh: Zeile 6: ./denied.py: Keine Berechtigung
train.sh: Zeile 7: echo: Schreibfehler: Auf dem Gerät ist kein Speicherplatz mehr verfügbar.
""",
    "fr_FR": """\
train.sh: ligne 1: torchrunx : commande introuvable
train.sh : ligne 2 : 4711 Processus arrêté      sh -c 'kill -9 $$'
train.sh : ligne 3 : 4711 Erreur de segmentation  (core dumped)sh -c 'kill -SEGV $$'
train.sh : ligne 4 : 4711 Erreur du bus           (core dumped)sh -c 'kill -BUS $$'
train.sh : ligne 5 : 4711 Abandon                 (core dumped)sh -c 'kill -ABRT $$'
train.sh: ligne 6: ./denied.py: Permission non accordée
train.sh: ligne 7 : echo: erreur d'écriture : Aucun espace disponible sur le périphérique
""",
    "ja_JP": """\
train.sh: 行 1: torchrunx: コマンドが見つかりません
train.sh: 2 行: 4711 強制終了            sh -c 'kill -9 $$'
train.sh: 3 行: 4711 Segmentation fault      (コアダンプ) sh -c 'kill -SEGV $$'
train.sh: 4 行: 4711 バスエラー         (コアダンプ) sh -c 'kill -BUS $$'
train.sh: 5 行: 4711 中止                  (コアダンプ) sh -c 'kill -ABRT $$'
train.sh: 行 6: ./denied.py: 許可がありません
train.sh: 7 行: echo: 書き込みエラー: デバイスに空き領域がありません
""",
    "es_ES": """\
train.sh: línea 1: torchrunx: orden no encontrada
train.sh: línea 2: 4711 Terminado (killed)      sh -c 'kill -9 $$'
train.sh: línea 3: 4711 Violación de segmento  (`core' generado) sh -c 'kill -SEGV $$'
train.sh: línea 4: 4711 Error del bus           (`core' generado) sh -c 'kill -BUS $$'
train.sh: línea 5: 4711 Abortado                (`core' generado) sh -c 'kill -ABRT $$'
train.sh: línea 6: ./denied.py: Permiso denegado
train.sh: línea 7: echo: error de escritura: No queda espacio en el dispositivo
""",
    "pt_BR": """\
train.sh: linha 1: torchrunx: comando não encontrado
train.sh, linha 2: 4711 Morto                   sh -c 'kill -9 $$'
train.sh, linha 3: 4711 Falha de segmentação  (imagem do núcleo gravada)sh -c 'kill -SEGV $$'
train.sh, linha 4: 4711 Erro no barramento      (imagem do núcleo gravada)sh -c 'kill -BUS $$'
train.sh, linha 5: 4711 Abortado                (imagem do núcleo gravada)sh -c 'kill -ABRT $$'
train.sh: linha 6: ./denied.py: Permissão negada
train.sh: linha 7: echo: erro de escrita: Não há espaço disponível no dispositivo
""",
    "pt_PT": """\
train.sh: linha 1: torchrunx: comando não encontrado
train.sh: linha 2: 4711 Morto                   sh -c 'kill -9 $$'
train.sh: linha 3: 4711 Falta de segmentação  (núcleo despejado) sh -c 'kill -SEGV $$'
train.sh: linha 4: 4711 Erro de bus             (núcleo despejado) sh -c 'kill -BUS $$'
train.sh: linha 5: 4711 Abortado                (núcleo despejado) sh -c 'kill -ABRT $$'
train.sh: linha 6: ./denied.py: Permissão recusada
train.sh: linha 7: echo: erro de escrita: Sem espaço livre no dispositivo
""",
    "ru_RU": """\
train.sh: строка 1: torchrunx: команда не найдена
train.sh: строка 2: 4711 Убито              sh -c 'kill -9 $$'
train.sh: строка 3: 4711 Ошибка сегментирования                   (образ памяти сброшен на диск) sh -c 'kill -SEGV $$'
train.sh: строка 4: 4711 Ошибка шины   (образ памяти сброшен на диск) sh -c 'kill -BUS $$'
train.sh: строка 5: 4711 Аварийный останов         (образ памяти сброшен на диск) sh -c 'kill -ABRT $$'
train.sh: строка 6: ./denied.py: Отказано в доступе
train.sh: строка 7: echo: ошибка записи: На устройстве не осталось свободного места
""",
}
CAUSES = [
    "system-tool-missing",
    "host-oom-killed",
    "sigsegv",
    "sigbus",
    "native-abort",
    "permission-denied",
    "disk-full",
]


def cause_of(line):
    return explain([(STEPS + line + "\n").encode()]).cause


@pytest.mark.parametrize("language", SHELLS)
def test_a_shell_in_another_language_shows_the_same_causes(language):
    assert [cause_of(line) for line in SHELLS[language].splitlines()] == CAUSES


def test_a_signal_counts_alone_padded_and_behind_a_progress_bar():
    bar = "100%|██████████| 10/10 [00:01<00:00, 9.9it/s]"
    for line in ("已杀死", "已杀死               python train.py", bar + "已杀死"):
        assert cause_of(line) == "host-oom-killed"
    assert cause_of("段错误（核心已转储）") == "sigsegv"


def test_a_translated_word_in_a_sentence_is_no_signal():
    for line in ("Abandon de la branche après 3 essais", "épocas: 10 Abortado no", "Morto em combate", "他已放弃治疗"):
        assert cause_of(line) == "healthy"


def test_the_evidence_is_the_line_as_the_log_has_it():
    [evidence] = explain([(STEPS + "/bin/bash: 行 1: torchrun: 未找到命令\n").encode()]).evidence
    assert evidence.text == "/bin/bash: 行 1: torchrun: 未找到命令"


def test_errors_of_the_c_library_are_read_in_english():
    english = load_catalogue().in_english
    assert english("mkdir: 无法创建目录“/data”：只读文件系统") == "mkdir: 无法创建目录“/data”: Read-only file system"
    assert english("ls : Le réseau n'est pas accessible") == "ls: Network is unreachable"
    assert english("bind: Die Adresse wird bereits verwendet") == "bind: Address already in use"


FAILED_IN_WORDS = {  # of a program itself
    "cuda-oom": (
        "训练失败:显存不足,请减小批大小", "GPUメモリが不足しています", "GPU 메모리 부족", "недостаточно памяти GPU",
        "mémoire du GPU insuffisante", "GPU-Speicher reicht nicht", "memoria de la GPU insuficiente",
    ),
    "host-oom-killed": (
        "内存不足", "メモリ不足です", "메모리가 부족합니다", "Недостаточно памяти", "mémoire insuffisante",
        "nicht genügend Speicher", "memoria insuficiente",
    ),
    "dataset-missing": (
        "找不到训练数据 data/train.jsonl", "学習データが見つかりません: data/train.jsonl", "데이터 파일을 찾을 수 없습니다: a.json",
        "файл данных не найден: a.json", "fichier de données introuvable : a.json", "Trainingsdaten nicht gefunden: a.json",
        "no se encontró el archivo de datos a.json",
    ),
    "unknown": ("GPU 数量不足", "число эпох не задано"),
}  # fmt: skip


def test_what_a_program_says_of_memory_and_data_in_another_language_is_read_in_its_errors_alone():
    for cause, messages in FAILED_IN_WORDS.items():
        for message in messages:
            assert explain([f"{STEPS}ERROR {message}\n".encode()]).cause == cause, message
            assert explain([f"{STEPS}INFO {message}\n{STEPS}".encode()]).cause == "healthy", message
